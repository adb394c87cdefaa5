#include "cpu.h"

#include <cstring>

#include "../common/residual.h"
#include "../common/rotate.h"
#include "../common/tile_ops.h"

namespace kdecode::KD_NS {

void draft_insert(const DraftInsertArgs& args, Worker& worker) {
  const std::int64_t width = args.proj.rows;
  Rows rows(worker, args.context, args.rows, args.proj.cols);
  linear_tiles(args.proj, rows, args.projected, worker);
  worker.barrier();
  worker.split(args.rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      const std::int64_t position = args.row_position[row];
      const std::int64_t page = args.row_pages[row * args.max_pages + position / args.page_tokens];
      bf16* const out = args.pages + (page * args.page_tokens + position % args.page_tokens) * width;
      const bf16* const in = args.projected + row * width;
      rms_norm_row(in, args.kv_norm, args.latent_eps, args.kv_rank, out);
      rotate_pairs(in + args.kv_rank, args.row_rotation + row * args.rope_dim, args.rope_dim, out + args.kv_rank);
    }
  });
}

}  // namespace kdecode::KD_NS
