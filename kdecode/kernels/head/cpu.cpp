#include "cpu.h"

#include "../common/threads.h"
#include "../common/tile_ops.h"

namespace kdecode::KD_NS {

void head(const HeadArgs& args, Worker& worker) {
  const int rows = args.mix.rows;
  const std::int64_t vocab = args.weight.rows;

  mix_norm(args.mix, worker);

  const Rows in(args.mix.norm_out, rows, args.mix.width);
  worker.split(args.weight.num_tiles(), units_per_claim(args.weight.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) {
      float sums[kMaxRows * kTileRows];
      tile_dot(args.weight, tile, rows, in.at, sums);
      const int columns = tile_width(args.weight, tile);
      for (int r = 0; r < rows; ++r) {
        float* out = args.logits + r * vocab + tile * kTileRows;
        for (int i = 0; i < columns; ++i) out[i] = widen(round_bf16(sums[r * kTileRows + i]));
      }
    }
  });
}

}  // namespace kdecode::KD_NS
