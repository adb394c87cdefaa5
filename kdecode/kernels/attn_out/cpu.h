// attn_out: output projection of the attention and the residual. See op.py for the maths.
#pragma once

#include "../common/exchange.h"
#include "../common/native.h"
#include "../common/threads.h"

namespace kdecode {

struct AttnOutArgs {
  Tiles o_proj;                    // [width, columns of attn_out], of this rank's heads
  const bf16* attn_out = nullptr;  // [rows, o_proj.cols]
  bf16* attn_delta = nullptr;      // [rows, width]
  bf16* prefix = nullptr;          // [rows, width]
  bf16* snapshot = nullptr;        // [rows, width], receives the old prefix; null: the delta is added to the prefix
  SharedExchange* exchange = nullptr;  // null: this is the only rank
  std::int32_t rows = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void attn_out(const AttnOutArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
