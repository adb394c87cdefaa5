#include "cpu.h"

#include "../common/threads.h"

namespace kdecode::KD_NS {

void embed(const EmbedArgs& args, Worker& worker) {
  worker.split(args.rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      const std::int64_t token = args.row_token[row];
      bf16* out = args.prefix + row * args.width;
      if (token < 0 || token >= args.vocab) {
        for (std::int64_t i = 0; i < args.width; ++i) out[i] = 0x7fc0;
        continue;
      }
      const bf16* in = args.table + token * args.width;
      for (std::int64_t i = 0; i < args.width; ++i) out[i] = in[i];
    }
  });
}

}  // namespace kdecode::KD_NS
