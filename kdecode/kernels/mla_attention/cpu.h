// Causal attention of a prompt's rows over expanded keys and values, on torch's OpenMP threads.
#pragma once

#include "../common/native.h"

namespace kdecode {

// Rows of every buffer are `*_step` numbers apart; the heads' parts follow each other in a row.
struct PromptAttentionArgs {
  const bf16* query = nullptr;   // [tokens, heads * (nope_dim + rope_dim)]
  const bf16* keys = nullptr;    // [start + tokens, heads * nope_dim]
  const bf16* rest = nullptr;    // [start + tokens, rope_dim], of all heads
  const bf16* values = nullptr;  // [start + tokens, heads * v_dim]
  bf16* out = nullptr;           // [tokens, heads * v_dim]
  std::int64_t query_step = 0, keys_step = 0, rest_step = 0, values_step = 0, out_step = 0;
  std::int64_t tokens = 0;
  std::int64_t start = 0;  // tokens before the first query's
  std::int64_t heads = 0;
  int nope_dim = 0, rope_dim = 0, v_dim = 0;  // multiples of 16
  float scale = 0;
};

inline constexpr int kMaxPromptWidth = 1024;  // of a query, and of a value

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void prompt_attention(const PromptAttentionArgs& args);

}  // namespace kdecode::KD_NS
#endif
