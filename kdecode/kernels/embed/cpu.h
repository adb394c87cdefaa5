// Token embedding. A row whose id is outside [0, vocab) becomes NaN; nothing is read for it.
#pragma once

#include "../common/exchange.h"
#include "../common/native.h"

namespace kdecode {

class Worker;

struct EmbedArgs {
  const std::int32_t* row_token = nullptr;  // [rows]
  const bf16* table = nullptr;              // [vocab, width], this rank's part of the vocabulary
  bf16* prefix = nullptr;                   // [rows, width]
  SharedExchange* exchange = nullptr;       // null: this is the only rank
  std::int64_t vocab = 0;
  std::int64_t width = 0;
  std::int32_t rows = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void embed(const EmbedArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
