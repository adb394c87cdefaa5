#include "residual.h"

#include "vmath.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kLanes = 16;     // partial sums, so that the compiler may vectorise without reordering anything
constexpr int kBlock = 256;    // columns of one pass over the sources

float sum_lanes(const float* lanes) {
  float sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = lanes[i];
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) sums[i] += sums[i + step];
  }
  return sums[0];
}

float sum_of_squares(const bf16* x, std::int64_t width) {
  float lanes[kLanes] = {};
  std::int64_t at = 0;
  for (; at + kLanes <= width; at += kLanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] = mul_add(widen(x[at + i]), widen(x[at + i]), lanes[i]);
  }
  for (int i = 0; at + i < width; ++i) lanes[i] = mul_add(widen(x[at + i]), widen(x[at + i]), lanes[i]);
  return sum_lanes(lanes);
}

float inverse_rms(const bf16* x, float eps, std::int64_t width) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, width) / static_cast<float>(width) + eps);
}

// The score of one source: <x, weight> / rms(x).
float score(const bf16* x, const float* weight, float eps, std::int64_t width) {
  float lanes[kLanes] = {};
  std::int64_t at = 0;
  for (; at + kLanes <= width; at += kLanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] = mul_add(widen(x[at + i]), weight[at + i], lanes[i]);
  }
  for (int i = 0; at + i < width; ++i) lanes[i] = mul_add(widen(x[at + i]), weight[at + i], lanes[i]);
  return sum_lanes(lanes) * inverse_rms(x, eps, width);
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

void mix_row(const MixNorm& args, int row, bf16* out) {
  const std::int64_t width = args.width;
  const bf16* sources[kMaxSnapshots + 1];
  float weights[kMaxSnapshots + 1];
  int count = 0;
  for (; count < args.num_snapshots; ++count) sources[count] = args.snapshots + (count * args.rows + row) * width;
  sources[count++] = args.prefix + row * width;
  for (int i = 0; i < count; ++i) weights[i] = score(sources[i], args.mix_weight, args.eps, width);
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

}  // namespace

void rms_norm_row(const bf16* x, const float* weight, float eps, std::int64_t width, bf16* out) {
  const float scale = inverse_rms(x, eps, width);
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
