// Matrix products of the standard forward: any number of rows, one matrix or a group of them, in one OpenMP region.
//
// These run between torch's operators, so they share torch's OpenMP threads instead of owning a pool.
#pragma once

#include "../common/native.h"

namespace kdecode {

// out[p, :] = W x[row_index[p], :] for the output rows p in [first, first + count).
struct LinearGroup {
  Tiles w;
  std::int64_t first = 0;
  std::int64_t count = 0;
};

struct LinearArgs {
  const bf16* x = nullptr;                  // [*, cols]
  const std::int64_t* row_index = nullptr;  // [P]; null: out[p] is made of x[p]
  void* out = nullptr;                      // [P, rows], bf16 or fp32
  bool is_out_fp32 = false;
  const LinearGroup* groups = nullptr;  // all of the same rows and cols
  std::int64_t num_groups = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void linear(const LinearArgs& args);
// out [w.rows, w.cols], bf16: the matrix in row-major order, dequantised (exactly) if it is MXFP4.
void unpack(const Tiles& w, bf16* out);

}  // namespace kdecode::KD_NS
#endif
