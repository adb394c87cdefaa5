#include "cpu.h"

#include "../common/threads.h"
#include "../common/tile_ops.h"

namespace kdecode::KD_NS {
namespace {

// Each rank has the logits of its part of the vocabulary, and gets all.
void logits_of_ranks(const HeadArgs& args, Rows& in, Worker& worker) {
  const int rows = args.mix.rows;
  const std::int64_t own = args.weight.rows;
  Parts parts(*args.exchange, worker);
  linear_tiles(args.weight, in, parts.mine<bf16>(), worker);
  parts.complete();
  split_parts(worker, rows, parts.size(), own, [&](std::int64_t row, int rank, std::int64_t start, int columns) {
    const bf16* part = parts.of<bf16>(rank) + row * own + start;
    float* out = args.logits + (row * parts.size() + rank) * own + start;
    for (int i = 0; i < columns; ++i) out[i] = widen(part[i]);
  });
}

}  // namespace

void head(const HeadArgs& args, Worker& worker) {
  const int rows = args.mix.rows;
  const std::int64_t vocab = args.weight.rows;

  mix_norm(args.mix, worker);

  Rows in(worker, args.mix.norm_out, rows, args.mix.width);
  if (args.exchange != nullptr) return logits_of_ranks(args, in, worker);
  worker.split(args.weight.num_tiles(), units_per_claim(args.weight.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) {
      float sums[kMaxRows * kTileRows];
      tile_dot(args.weight, tile, in, sums);
      const int columns = tile_width(args.weight, tile);
      for (int r = 0; r < rows; ++r) {
        float* out = args.logits + r * vocab + tile * kTileRows;
        for (int i = 0; i < columns; ++i) out[i] = widen(round_bf16(sums[r * kTileRows + i]));
      }
    }
  });
}

}  // namespace kdecode::KD_NS
