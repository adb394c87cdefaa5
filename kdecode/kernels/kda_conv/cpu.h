// The short convolution of the standard forward over the rows of one request, on torch's OpenMP threads.
#pragma once

#include "../common/native.h"

namespace kdecode {

inline constexpr int kConvTaps = 4;

struct ConvolveArgs {
  const bf16* raw = nullptr;    // [tokens, raw_stride], of which `channels` columns are read
  std::int64_t raw_stride = 0;
  bf16* window = nullptr;       // [kConvTaps - 1, channels], oldest sample first; left at the last raw samples
  const float* taps = nullptr;  // [kConvTaps, channels], newest last
  bf16* out = nullptr;          // [tokens, channels]
  std::int64_t tokens = 0;
  std::int64_t channels = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void convolve(const ConvolveArgs& args);

}  // namespace kdecode::KD_NS
#endif
