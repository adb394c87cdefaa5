// The delta rule in chunked form over the rows of one request, on torch's OpenMP threads. See op.py for the maths.
#pragma once

#include "../common/native.h"

namespace kdecode {

struct DeltaRuleArgs {
  const bf16* qkv = nullptr;    // [tokens, 3, heads, head_dim], after the convolution, not normalised
  const float* decay = nullptr; // [tokens, heads, head_dim], g of op.py
  const float* beta = nullptr;  // [tokens, heads]
  float* state = nullptr;       // [heads, head_dim (K), head_dim (V)], moved past the tokens
  bf16* out = nullptr;          // [tokens, heads, head_dim]
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;  // a multiple of 16
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void delta_rule_chunks(const DeltaRuleArgs& args);

}  // namespace kdecode::KD_NS
#endif
