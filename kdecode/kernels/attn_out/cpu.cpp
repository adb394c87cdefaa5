#include "cpu.h"

#include <cstring>

#include "../common/tile_ops.h"

namespace kdecode::KD_NS {
namespace {

// The residual of `count` numbers from `at`, whose delta is there.
void move_residual(const AttnOutArgs& args, std::int64_t at, int count) {
  if (args.snapshot == nullptr) {
    add_residual(args.attn_delta + at, count, args.prefix + at);
  } else {
    std::memcpy(args.snapshot + at, args.prefix + at, count * sizeof(bf16));
    std::memcpy(args.prefix + at, args.attn_delta + at, count * sizeof(bf16));
  }
}

// Each rank has the columns of its heads, so that a product is a part of the delta.
void attn_out_of_ranks(const AttnOutArgs& args, Worker& worker) {
  const Tiles& w = args.o_proj;
  Parts parts(*args.exchange, worker);
  Rows in(worker, args.attn_out, args.rows, w.cols);
  linear_tiles(w, in, parts.mine<float>(), worker);
  parts.complete();
  split_columns(worker, args.rows, w.rows, [&](std::int64_t row, std::int64_t start, int columns) {
    const std::int64_t at = row * w.rows + start;
    sum_parts(parts, 0, at, columns, args.attn_delta + at);
    move_residual(args, at, columns);
  });
}

}  // namespace

void attn_out(const AttnOutArgs& args, Worker& worker) {
  if (args.exchange != nullptr) return attn_out_of_ranks(args, worker);
  const Tiles& w = args.o_proj;
  Rows in(worker, args.attn_out, args.rows, w.cols);
  // Whoever computes a tile's columns of the delta also moves the residual there, so nobody waits.
  worker.split(w.num_tiles(), units_per_claim(w.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) {
      linear_tile(w, tile, in, args.attn_delta, w.rows);
      for (int r = 0; r < args.rows; ++r) move_residual(args, r * w.rows + tile * kTileRows, tile_width(w, tile));
    }
  });
}

}  // namespace kdecode::KD_NS
