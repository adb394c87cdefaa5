#include "cpu.h"

#include "../common/threads.h"

namespace kdecode::KD_NS {
namespace {

// Each rank has a part of the MLP's width, so that a product is a part of the delta.
void down_of_ranks(const DenseMlpArgs& args, Rows& products, Worker& worker) {
  const int rows = args.mix.rows;
  const std::int64_t width = args.mix.width;
  Parts parts(*args.exchange, worker);
  linear_tiles(args.down, products, parts.mine<float>(), worker);
  parts.complete();
  split_columns(worker, rows, width, [&](std::int64_t row, std::int64_t start, int columns) {
    const std::int64_t at = row * width + start;
    sum_parts(parts, 0, at, columns, args.mlp_delta + at);
    add_residual(args.mlp_delta + at, columns, args.residual + at);
  });
}

}  // namespace

void dense_mlp(const DenseMlpArgs& args, Worker& worker) {
  const int rows = args.mix.rows;
  const std::int64_t width = args.mix.width;
  const std::int64_t inner = args.down.cols;

  mix_norm(args.mix, worker);

  Rows in(worker, args.mix.norm_out, rows, width);
  bf16* product[kMaxRows];
  for (int r = 0; r < rows; ++r) product[r] = args.product + r * inner;
  worker.split(inner / kTileRows, units_per_claim(2 * args.gate_up.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t pair = first; pair < last; ++pair) gated_pair(args.gate_up, pair, in, args.activation, product);
  });
  worker.barrier();

  Rows products(worker, args.product, rows, inner);
  if (args.exchange != nullptr) return down_of_ranks(args, products, worker);
  worker.split(args.down.num_tiles(), units_per_claim(args.down.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) {
      linear_tile(args.down, tile, products, args.mlp_delta, width);
      for (int r = 0; r < rows; ++r) {
        const std::int64_t at = r * width + tile * kTileRows;
        add_residual(args.mlp_delta + at, tile_width(args.down, tile), args.residual + at);
      }
    }
  });
}

}  // namespace kdecode::KD_NS
