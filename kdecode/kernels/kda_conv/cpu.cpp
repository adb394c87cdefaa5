#include "cpu.h"

#include <algorithm>

#include "../common/vmath.h"

namespace kdecode::KD_NS {
namespace {

constexpr std::int64_t kBlockChannels = 512;  // so that the samples of a few tokens stay in the first-level cache
constexpr std::int64_t kMinParallelNumbers = 16 * 1024;

// One token: SiLU of the convolution of the samples `at` (oldest first) at `count` channels.
void convolve_token(const bf16* const* at, const float* const* tap, std::int64_t count, bf16* __restrict out) {
  const bf16* const first = at[0];
  const bf16* const second = at[1];
  const bf16* const third = at[2];
  const bf16* const now = at[3];
  for (std::int64_t i = 0; i < count; ++i) {
    float y = widen(first[i]) * tap[0][i];
    y = mul_add(widen(second[i]), tap[1][i], y);
    y = mul_add(widen(third[i]), tap[2][i], y);
    y = mul_add(widen(now[i]), tap[3][i], y);
    out[i] = round_bf16(silu(y));
  }
}

void convolve_channels(const ConvolveArgs& args, std::int64_t begin, std::int64_t count) {
  const float* tap[kConvTaps];
  for (int j = 0; j < kConvTaps; ++j) tap[j] = args.taps + j * args.channels + begin;
  const auto sample = [&](std::int64_t token) -> const bf16* {  // from -(kConvTaps - 1) on
    return token < 0 ? args.window + (token + kConvTaps - 1) * args.channels + begin : args.raw + token * args.raw_stride + begin;
  };
  for (std::int64_t token = 0; token < args.tokens; ++token) {
    const bf16* at[kConvTaps];
    for (int j = 0; j < kConvTaps; ++j) at[j] = sample(token + j - (kConvTaps - 1));
    convolve_token(at, tap, count, args.out + token * args.channels + begin);
  }
  for (int j = 0; j < kConvTaps - 1; ++j) {  // oldest first: each is read before it is overwritten
    const bf16* const from = sample(args.tokens + j - (kConvTaps - 1));
    std::copy(from, from + count, args.window + j * args.channels + begin);
  }
}

}  // namespace

void convolve(const ConvolveArgs& args) {
  const std::int64_t blocks = (args.channels + kBlockChannels - 1) / kBlockChannels;
#pragma omp parallel for schedule(static) if (args.tokens * args.channels >= kMinParallelNumbers)
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t begin = block * kBlockChannels;
    convolve_channels(args, begin, std::min(kBlockChannels, args.channels - begin));
  }
}

}  // namespace kdecode::KD_NS
