// kda_commit: moves KDA slots past the kept rows of a verify step. See op.py for the maths.
#pragma once

#include "../common/native.h"
#include "../common/threads.h"

namespace kdecode {

struct KdaCommitArgs {
  // [max_requests, 3]: slot, first row of the step, rows that stay; a line of 0 rows is nobody's.
  const std::int32_t* kept = nullptr;
  bf16* window = nullptr;              // [slots, 3, 3 * heads * head_dim], oldest sample first
  float* state = nullptr;              // [slots, heads, head_dim (K), head_dim (V)]
  const float* keys = nullptr;         // what `kda_front` recorded of the step's rows
  const float* decays = nullptr;
  const float* corrections = nullptr;
  const bf16* samples = nullptr;
  std::int32_t max_requests = 0;
  std::int32_t heads = 0;
  std::int32_t head_dim = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void kda_commit(const KdaCommitArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
