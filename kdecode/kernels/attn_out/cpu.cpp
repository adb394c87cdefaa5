#include "cpu.h"

#include <cstring>

#include "../common/tile_ops.h"

namespace kdecode::KD_NS {

void attn_out(const AttnOutArgs& args, Worker& worker) {
  const Tiles& w = args.o_proj;
  const Rows in(args.attn_out, args.rows, w.cols);
  // Whoever computes a tile's columns of the delta also moves the residual there, so nobody waits.
  worker.split(w.num_tiles(), units_per_claim(w.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) {
      linear_tile(w, tile, args.rows, in.at, args.attn_delta, w.rows);
      const int count = tile_width(w, tile);
      for (int r = 0; r < args.rows; ++r) {
        const std::int64_t at = r * w.rows + tile * kTileRows;
        if (args.snapshot == nullptr) {
          add_residual(args.attn_delta + at, count, args.prefix + at);
        } else {
          std::memcpy(args.snapshot + at, args.prefix + at, count * sizeof(bf16));
          std::memcpy(args.prefix + at, args.attn_delta + at, count * sizeof(bf16));
        }
      }
    }
  });
}

}  // namespace kdecode::KD_NS
