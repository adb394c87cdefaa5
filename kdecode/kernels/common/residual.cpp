#include "residual.h"

#include "vec.h"
#include "vmath.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kBlock = 256;  // columns of one pass over the sources

struct Sums {
  float squares;
  float products;
};

// sum x^2 and, unless `weight` is null, sum x * weight. Two accumulators of each hide the latency of an addition.
Sums sums_of(const bf16* x, const float* weight, std::int64_t width) {
  vec squares[2] = {}, products[2] = {};
  std::int64_t at = 0;
  for (; at + 2 * kLanes <= width; at += 2 * kLanes) {
    for (int half = 0; half < 2; ++half) {
      const vec value = load(x + at + half * kLanes);
      squares[half] = mul_add(value, value, squares[half]);
      if (weight != nullptr) products[half] = mul_add(value, load(weight + at + half * kLanes), products[half]);
    }
  }
  Sums sums{sum(squares[0] + squares[1]), sum(products[0] + products[1])};
  for (; at < width; ++at) {
    const float value = widen(x[at]);
    sums.squares = mul_add(value, value, sums.squares);
    if (weight != nullptr) sums.products = mul_add(value, weight[at], sums.products);
  }
  return sums;
}

float inverse_rms(float squares, float eps, std::int64_t width) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + eps);
}

// Scores -> weights that sum to 1.
void softmax(float* scores, int count) {
  float highest = scores[0];
  for (int i = 1; i < count; ++i) highest = scores[i] > highest ? scores[i] : highest;
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) {
    scores[i] = exp(scores[i] - highest);
    sum += scores[i];
  }
  for (int i = 0; i < count; ++i) scores[i] /= sum;
}

}  // namespace

void mix_row(const MixNorm& args, int row, bf16* out) {
  const std::int64_t width = args.width;
  const bf16* sources[kMaxSnapshots + 1];
  float weights[kMaxSnapshots + 1];
  int count = 0;
  for (; count < args.num_snapshots; ++count) sources[count] = args.snapshots + (count * args.rows + row) * width;
  sources[count++] = args.prefix + row * width;
  for (int i = 0; i < count; ++i) {
    const Sums sums = sums_of(sources[i], args.mix_weight, width);
    weights[i] = sums.products * inverse_rms(sums.squares, args.eps, width);
  }
  softmax(weights, count);
  for (std::int64_t start = 0; start < width; start += kBlock) {
    const int columns = static_cast<int>(width - start < kBlock ? width - start : kBlock);
    float sums[kBlock] = {};
    for (int i = 0; i < count; ++i) {
      const bf16* x = sources[i] + start;
      for (int c = 0; c < columns; ++c) sums[c] = mul_add(weights[i], widen(x[c]), sums[c]);
    }
    for (int c = 0; c < columns; ++c) out[start + c] = round_bf16(sums[c]);
  }
}

void rms_norm_row(const bf16* x, const float* weight, float eps, std::int64_t width, bf16* out) {
  const float scale = inverse_rms(sums_of(x, nullptr, width).squares, eps, width);
  for (std::int64_t i = 0; i < width; ++i) out[i] = round_bf16(widen(x[i]) * scale * weight[i]);
}

void mix_norm_row(const MixNorm& args, int row) {
  bf16* mix = args.mix_out + row * args.width;
  if (args.mix_weight == nullptr || args.num_snapshots == 0) {
    const bf16* prefix = args.prefix + row * args.width;
    for (std::int64_t i = 0; i < args.width; ++i) mix[i] = prefix[i];
  } else {
    mix_row(args, row, mix);
  }
  rms_norm_row(mix, args.norm_weight, args.eps, args.width, args.norm_out + row * args.width);
}

}  // namespace kdecode::KD_NS
