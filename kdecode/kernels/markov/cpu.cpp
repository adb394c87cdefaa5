#include "cpu.h"

#include <cstring>

#include "../common/tile_ops.h"

namespace kdecode::KD_NS {

void markov(const MarkovArgs& args, Worker& worker) {
  const std::int64_t vocab = args.out.rows;
  Rows in(worker);
  in.set(args.rows, [&](int r) { return args.table + std::int64_t{args.row_previous[r]} * args.out.cols; });
  worker.split(args.out.num_tiles(), units_per_claim(args.out.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) {
      float sums[kMaxRows * kTileRows];
      tile_dot(args.out, tile, in, sums);
      const int columns = tile_width(args.out, tile);
      for (int r = 0; r < args.rows; ++r) {
        std::memcpy(args.bias + r * vocab + tile * kTileRows, sums + r * kTileRows, columns * sizeof(float));
      }
    }
  });
}

}  // namespace kdecode::KD_NS
