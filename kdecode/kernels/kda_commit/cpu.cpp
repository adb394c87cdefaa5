#include "cpu.h"

#include <cstring>

#include "../common/vec.h"
#include "../common/vmath.h"
#include "../kda_front/cpu.h"

namespace kdecode::KD_NS {
namespace {

// One request's kept rows of the step.
struct Kept {
  std::int64_t slot;
  std::int64_t first;
  int rows;
};

void move_window(const KdaCommitArgs& args, const Kept& kept, int head) {
  const int dim = args.head_dim;
  const std::int64_t width = std::int64_t{args.heads} * dim, stride = 3 * width;
  for (int group = 0; group < 3; ++group) {
    const std::int64_t channel = group * width + std::int64_t{head} * dim;
    bf16* const window = args.window + kept.slot * 3 * stride + channel;
    const bf16* const samples = args.samples + kept.first * stride + channel;
    // Oldest first: a sample that stays in the window is read before its place is written.
    for (int j = 0; j < 3; ++j) {
      const int at = j + kept.rows;
      const bf16* const source = at < 3 ? window + at * stride : samples + (at - 3) * stride;
      std::memcpy(window + j * stride, source, dim * sizeof(bf16));
    }
  }
}

// N vectors of one line of the state through all rows: s = decay s + k u, as `kda_front` updates it.
template <int N>
inline void move_line(float* line, int rows, const float* const* u, int column, const float* decay, const float* k) {
  vec s[N];
  for (int n = 0; n < N; ++n) s[n] = load(line + n * kLanes);
  for (int r = 0; r < rows; ++r) {
    const vec kept = splat(decay[r]), added = splat(k[r]);
    for (int n = 0; n < N; ++n) s[n] = mul_add(added, load(u[r] + column + n * kLanes), kept * s[n]);
  }
  for (int n = 0; n < N; ++n) store(line + n * kLanes, s[n]);
}

void move_state(const KdaCommitArgs& args, const Kept& kept, int head) {
  constexpr int kColumns = 64 / static_cast<int>(sizeof(float));
  const int dim = args.head_dim;
  const std::int64_t width = std::int64_t{args.heads} * dim, channel = std::int64_t{head} * dim;
  float* const state = args.state + (kept.slot * args.heads + head) * dim * dim;
  // What multiplies one line of the state, row by row, side by side.
  alignas(64) float decay[kMaxKdaHeadDim * kMaxVerifyRows], k[kMaxKdaHeadDim * kMaxVerifyRows];
  const float* u[kMaxVerifyRows];
  for (int r = 0; r < kept.rows; ++r) {
    const std::int64_t row = (kept.first + r) * width + channel;
    u[r] = args.corrections + row;
    for (int i = 0; i < dim; ++i) {
      decay[i * kept.rows + r] = exp(args.decays[row + i]);
      k[i * kept.rows + r] = args.keys[row + i];
    }
  }
  for (int i = 0; i < dim; ++i) {
    float* const line = state + i * dim;
    const float* const line_decay = decay + i * kept.rows;
    const float* const line_k = k + i * kept.rows;
    int v = 0;
    for (; v + 4 * kColumns <= dim; v += 4 * kColumns) {
      move_line<4 * kColumns / kLanes>(line + v, kept.rows, u, v, line_decay, line_k);
    }
    for (; v < dim; v += kColumns) move_line<kColumns / kLanes>(line + v, kept.rows, u, v, line_decay, line_k);
  }
}

}  // namespace

void kda_commit(const KdaCommitArgs& args, Worker& worker) {
  worker.split(std::int64_t{args.max_requests} * args.heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t unit = first; unit < last; ++unit) {
      const std::int32_t* const line = args.kept + unit / args.heads * 3;
      const Kept kept{line[0], line[1], line[2]};
      const int head = static_cast<int>(unit % args.heads);
      if (kept.rows == 0) continue;
      move_window(args, kept, head);
      move_state(args, kept, head);
    }
  });
}

}  // namespace kdecode::KD_NS
