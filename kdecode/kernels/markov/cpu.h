// markov: what the token before adds to a draft's logits. See op.py for the maths.
#pragma once

#include "../common/native.h"
#include "../common/threads.h"

namespace kdecode {

struct MarkovArgs {
  Tiles out;                                   // [vocab, rank]
  const bf16* table = nullptr;                 // [vocab, rank]
  const std::int32_t* row_previous = nullptr;  // [rows], tokens of the vocabulary
  float* bias = nullptr;                       // [rows, vocab]
  std::int32_t rows = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void markov(const MarkovArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
