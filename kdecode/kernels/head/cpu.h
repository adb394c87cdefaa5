// The end of the model: final mix, norm, logits.
#pragma once

#include "../common/exchange.h"
#include "../common/native.h"
#include "../common/residual.h"

namespace kdecode {

class Worker;

struct HeadArgs {
  MixNorm mix;
  Tiles weight;             // [vocab, width], this rank's part of the vocabulary
  float* logits = nullptr;  // [rows, vocab of all ranks], bf16-rounded values
  SharedExchange* exchange = nullptr;  // null: this is the only rank
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void head(const HeadArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
