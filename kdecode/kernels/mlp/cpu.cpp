#include "cpu.h"

#include "../common/vmath.h"

namespace kdecode::KD_NS {
namespace {

constexpr std::int64_t kMinParallelNumbers = 16 * 1024;

// `count` neighbouring columns.
void activate(const Activation& activation, const bf16* __restrict gate, const bf16* __restrict up, std::int64_t count,
              bf16* __restrict out) {
  if (activation.is_situ) {
    const float beta = activation.beta, linear_beta = activation.linear_beta;
    for (std::int64_t i = 0; i < count; ++i) out[i] = round_bf16(situ(widen(gate[i]), widen(up[i]), beta, linear_beta));
  } else {
    for (std::int64_t i = 0; i < count; ++i) out[i] = round_bf16(silu(widen(gate[i])) * widen(up[i]));
  }
}

}  // namespace

void gated(const GatedArgs& args) {
  const std::int64_t width = args.width;
#pragma omp parallel for schedule(static) if (args.rows * width >= kMinParallelNumbers)
  for (std::int64_t row = 0; row < args.rows; ++row) {
    const bf16* const product = args.product + row * 2 * width;
    bf16* const out = args.out + row * width;
    if (!args.is_interleaved) {
      activate(args.activation, product, product + width, width, out);
      continue;
    }
    for (std::int64_t start = 0; start < width; start += kTileRows) {
      activate(args.activation, product + 2 * start, product + 2 * start + kTileRows, kTileRows, out + start);
    }
  }
}

}  // namespace kdecode::KD_NS
