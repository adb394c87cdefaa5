// The gated activation between two products of the standard forward, for any number of rows, on torch's OpenMP threads.
#pragma once

#include "../common/tile_ops.h"

namespace kdecode {

struct GatedArgs {
  const bf16* product = nullptr;  // [rows, 2 * width]
  bf16* out = nullptr;            // [rows, width]
  std::int64_t rows = 0;
  std::int64_t width = 0;
  bool is_interleaved = false;  // gate and up in turns of 16 columns, else one after the other
  Activation activation;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void gated(const GatedArgs& args);

}  // namespace kdecode::KD_NS
#endif
