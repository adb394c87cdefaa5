#include "cpu.h"

#include "../common/residual.h"
#include "../common/tile_ops.h"

namespace kdecode::KD_NS {

void draft_context(const DraftContextArgs& args, Worker& worker) {
  const std::int64_t width = args.proj.rows, columns = args.proj.cols, taps = columns / width;
  const bf16* in = args.taps;
  if (args.tap_norms != nullptr) {
    in = args.normed;
    worker.split(args.rows * taps, 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t tap = first; tap < last; ++tap) {
        rms_norm_row(args.taps + tap * width, args.tap_norms + tap % taps * width, args.eps, width, args.normed + tap * width);
      }
    });
    worker.barrier();
  }
  Rows rows(worker, in, args.rows, columns);
  linear_tiles(args.proj, rows, args.projected, worker);
  worker.barrier();
  worker.split(args.rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      rms_norm_row(args.projected + row * width, args.norm, args.eps, width, args.context + row * width);
    }
  });
}

}  // namespace kdecode::KD_NS
