// draft_context: what was tapped from the target -> one row that all layers of a draft cache. See op.py for the maths.
#pragma once

#include "../common/native.h"
#include "../common/threads.h"

namespace kdecode {

struct DraftContextArgs {
  Tiles proj;                        // [width, taps * width]
  const bf16* taps = nullptr;        // [rows, taps, width]
  const float* tap_norms = nullptr;  // [taps, width]; null: the taps are projected as they are
  bf16* normed = nullptr;            // [rows, taps, width], with tap_norms only
  const float* norm = nullptr;       // [width]
  bf16* projected = nullptr;         // [rows, width]
  bf16* context = nullptr;           // [rows, width]
  float eps = 0;
  std::int32_t rows = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void draft_context(const DraftContextArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
