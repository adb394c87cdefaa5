// The end of the model: final mix, norm, logits.
#pragma once

#include "../common/native.h"
#include "../common/residual.h"

namespace kdecode {

class Worker;

struct HeadArgs {
  MixNorm mix;
  Tiles weight;             // [vocab, width]
  float* logits = nullptr;  // [rows, vocab], bf16-rounded values
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void head(const HeadArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
