// The sum of ready values of all ranks, on its own: what the fused ops do after a product. For measurements and tests.
#pragma once

#include "../common/exchange.h"
#include "../common/native.h"

namespace kdecode {

struct ReducePartsArgs {
  SharedExchange* exchange = nullptr;
  const float* part = nullptr;  // [rows, width]
  bf16* out = nullptr;          // [rows, width]
  std::int64_t width = 0;
  std::int32_t rows = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void reduce_parts(const ReducePartsArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
