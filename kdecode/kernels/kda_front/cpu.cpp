#include "cpu.h"

#include "../common/tile_ops.h"
#include "../common/vec.h"

namespace kdecode::KD_NS {
namespace {

constexpr float kL2Eps = 1e-6f;
constexpr float kSoftplusLinearAbove = 20.0f;
// Vectors of the state's columns that one pass keeps in registers, twice (two reads at a time).
constexpr int kStripe = kLanes == 16 ? 8 : 4;
// Rows of the state of one piece, which stays in the first-level cache until all stripes have read it.
constexpr int kPieceRows = 16;

// ln(1 + e^z).
inline float softplus(float z) {
  // ln(1 + t) = 2 artanh(s) with s = t / (2 + t) <= 1/3, by its series.
  const float t = exp(-absolute(z));
  const float s = t / (2.0f + t);
  const float square = s * s;
  float p = 1.0f / 15.0f;
  p = mul_add(p, square, 1.0f / 13.0f);
  p = mul_add(p, square, 1.0f / 11.0f);
  p = mul_add(p, square, 1.0f / 9.0f);
  p = mul_add(p, square, 1.0f / 7.0f);
  p = mul_add(p, square, 1.0f / 5.0f);
  p = mul_add(p, square, 1.0f / 3.0f);
  p = mul_add(p, square, 1.0f);
  const float bent = (z > 0.0f ? z : 0.0f) + 2.0f * s * p;
  return z > kSoftplusLinearAbove ? z : bent;
}

float sum_of_squares(const bf16* x, int count) {
  vec total{};
  for (int i = 0; i < count; i += kLanes) total = mul_add(load(x + i), load(x + i), total);
  return sum(total);
}

float dot(const float* x, const float* y, int count) {
  vec total{};
  for (int i = 0; i < count; i += kLanes) total = mul_add(load(x + i), load(y + i), total);
  return sum(total);
}

// SiLU of the convolution at `count` channels, and the window moved on by one sample.
void convolve(const float* taps, std::int64_t tap_stride, const bf16* __restrict sample, bf16* __restrict window,
              std::int64_t window_stride, int count, bf16* __restrict out) {
  const float* const tap[4] = {taps, taps + tap_stride, taps + 2 * tap_stride, taps + 3 * tap_stride};
  bf16* __restrict const oldest = window;
  bf16* __restrict const middle = window + window_stride;
  bf16* __restrict const newest = window + 2 * window_stride;
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    const bf16 second = middle[i], third = newest[i], now = sample[i];
    float y = widen(oldest[i]) * tap[0][i];
    y = mul_add(widen(second), tap[1][i], y);
    y = mul_add(widen(third), tap[2][i], y);
    y = mul_add(widen(now), tap[3][i], y);
    out[i] = round_bf16(silu(y));
    oldest[i] = second;
    middle[i] = third;
    newest[i] = now;
  }
}

// out = x / |x| * scale.
void normalise(const bf16* x, int count, float scale, float* out) {
  const float factor = scale / __builtin_sqrtf(sum_of_squares(x, count) + kL2Eps);
  for (int i = 0; i < count; ++i) out[i] = widen(x[i]) * factor;
}

// read_k[v] += sum_i k[i] S[i][v] and read_q[v] likewise, over `count` rows of the state and N vectors of columns.
template <int N>
inline void read_stripe(const float* state, int stride, int count, const float* k, const float* q, float* read_k, float* read_q) {
  vec by_k[N], by_q[N];
  for (int n = 0; n < N; ++n) by_k[n] = load(read_k + n * kLanes), by_q[n] = load(read_q + n * kLanes);
  for (int i = 0; i < count; ++i) {
    const vec ki = splat(k[i]), qi = splat(q[i]);
    for (int n = 0; n < N; ++n) {
      const vec s = load(state + i * stride + n * kLanes);
      by_k[n] = mul_add(ki, s, by_k[n]);
      by_q[n] = mul_add(qi, s, by_q[n]);
    }
  }
  for (int n = 0; n < N; ++n) store(read_k + n * kLanes, by_k[n]), store(read_q + n * kLanes, by_q[n]);
}

void read_state(const float* state, int dim, const float* k, const float* q, float* read_k, float* read_q) {
  for (int v = 0; v < dim; ++v) read_k[v] = read_q[v] = 0.0f;
  for (int row = 0; row < dim; row += kPieceRows) {
    const float* const piece = state + row * dim;
    int v = 0;
    for (; v + kStripe * kLanes <= dim; v += kStripe * kLanes) {
      read_stripe<kStripe>(piece + v, dim, kPieceRows, k + row, q + row, read_k + v, read_q + v);
    }
    for (; v < dim; v += kLanes) read_stripe<1>(piece + v, dim, kPieceRows, k + row, q + row, read_k + v, read_q + v);
  }
}

// S[i][v] = decay[i] S[i][v] + k[i] u[v].
void update_state(float* state, int dim, const float* decay, const float* k, const float* u) {
  for (int i = 0; i < dim; ++i) {
    const vec kept = splat(decay[i]), added = splat(k[i]);
    float* const line = state + i * dim;
    for (int v = 0; v < dim; v += kLanes) store(line + v, mul_add(added, load(u + v), kept * load(line + v)));
  }
}

// One token of one head: q, k, v [dim] after the convolution, its log decay and beta; the read-out, rounded, to `out`.
void delta_rule(const bf16* q, const bf16* k, const bf16* v, const float* log_decay, float beta, int dim, float* state, bf16* out) {
  alignas(64) float q_unit[kMaxKdaHeadDim], k_unit[kMaxKdaHeadDim], decay[kMaxKdaHeadDim];
  alignas(64) float q_kept[kMaxKdaHeadDim], k_kept[kMaxKdaHeadDim];
  alignas(64) float read_q[kMaxKdaHeadDim], read_k[kMaxKdaHeadDim];
  normalise(q, dim, 1.0f / __builtin_sqrtf(static_cast<float>(dim)), q_unit);
  normalise(k, dim, 1.0f, k_unit);
  for (int i = 0; i < dim; ++i) {
    decay[i] = exp(log_decay[i]);
    q_kept[i] = q_unit[i] * decay[i];
    k_kept[i] = k_unit[i] * decay[i];
  }
  // The state is read once for both: what the new one gives q is what the decayed one gives, plus (q k) u.
  read_state(state, dim, k_kept, q_kept, read_k, read_q);
  const float along = dot(q_unit, k_unit, dim);
  float* const u = read_k;
  for (int i = 0; i < dim; ++i) {
    u[i] = beta * (widen(v[i]) - read_k[i]);
    out[i] = round_bf16(mul_add(along, u[i], read_q[i]));
  }
  update_state(state, dim, decay, k_unit, u);
}

// RMSNorm of one head's output times the sigmoid gate, rounded once.
void gated_norm(const bf16* x, const float* weight, float eps, const bf16* gate, int count, bf16* out) {
  const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, count) / static_cast<float>(count) + eps);
  for (int i = 0; i < count; ++i) out[i] = round_bf16(widen(x[i]) * factor * weight[i] * sigmoid(widen(gate[i])));
}

// First columns of the groups of kda_proj.
struct Columns {
  explicit Columns(const KdaFrontArgs& args)
      : width(std::int64_t{args.heads} * args.head_dim), gate(3 * width), decay(gate + args.gate_rank), beta(decay + args.decay_rank) {}
  std::int64_t width, gate, decay, beta;
};

// The log decay and beta of one head, all rows.
void head_gates(const KdaFrontArgs& args, int head) {
  const Columns columns(args);
  const int dim = args.head_dim, rows = args.mix.rows;
  const std::int64_t proj_width = args.in_proj.rows;
  const Rows in(args.kda_proj + columns.decay, rows, proj_width);
  const float scale = args.decay_scale[head];
  float sums[kMaxRows * kTileRows];
  for (int start = 0; start < dim; start += kTileRows) {
    const std::int64_t channel = std::int64_t{head} * dim + start;
    tile_dot(args.f_b, channel / kTileRows, rows, in.at, sums);
    for (int r = 0; r < rows; ++r) {
      float* const out = args.kda_decay + r * columns.width + channel;
      for (int i = 0; i < kTileRows; ++i) {
        const float z = widen(round_bf16(sums[r * kTileRows + i])) + args.dt_bias[channel + i];
        out[i] = args.is_softplus_gate ? -scale * softplus(z) : args.gate_lower_bound * sigmoid(scale * z);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    args.kda_beta[r * args.heads + head] = sigmoid(widen(args.kda_proj[r * proj_width + columns.beta + head]));
  }
}

// One head of all rows, in row order: rows of one slot are consecutive tokens.
void run_head(const KdaFrontArgs& args, int head) {
  const Columns columns(args);
  const int dim = args.head_dim, rows = args.mix.rows;
  const std::int64_t width = columns.width, proj_width = args.in_proj.rows;
  const std::int64_t first = std::int64_t{head} * dim;
  head_gates(args, head);
  const bool has_low_rank_gate = args.g_b.data != nullptr;
  bf16 low_rank_gate[kMaxRows * kMaxKdaHeadDim];
  if (has_low_rank_gate) {
    const Rows in(args.kda_proj + columns.gate, rows, proj_width);
    float sums[kMaxRows * kTileRows];
    for (int start = 0; start < dim; start += kTileRows) {
      tile_dot(args.g_b, (first + start) / kTileRows, rows, in.at, sums);
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < kTileRows; ++i) low_rank_gate[r * dim + start + i] = round_bf16(sums[r * kTileRows + i]);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    const bf16* const proj = args.kda_proj + r * proj_width;
    bf16* const qkv = args.kda_qkv + r * 3 * width;
    const std::int64_t slot = args.row_slot[r];
    for (int group = 0; group < 3; ++group) {
      const std::int64_t channel = group * width + first;
      convolve(args.conv + channel, 3 * width, proj + channel, args.window + slot * 9 * width + channel, 3 * width, dim,
               qkv + channel);
    }
    bf16* const out = args.kda_out + r * width + first;
    float* const state = args.state + (slot * args.heads + head) * dim * dim;
    delta_rule(qkv + first, qkv + width + first, qkv + 2 * width + first, args.kda_decay + r * width + first,
               args.kda_beta[r * args.heads + head], dim, state, out);
    const bf16* const gate = has_low_rank_gate ? low_rank_gate + r * dim : proj + columns.gate + first;
    gated_norm(out, args.out_norm, args.mix.eps, gate, dim, args.attn_out + r * width + first);
  }
}

}  // namespace

void kda_front(const KdaFrontArgs& args, Worker& worker) {
  const int rows = args.mix.rows;
  mix_norm(args.mix, worker);

  const Rows in(args.mix.norm_out, rows, args.in_proj.cols);
  linear_tiles(args.in_proj, rows, in.at, args.kda_proj, worker);
  worker.barrier();

  worker.split(args.heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t head = first; head < last; ++head) run_head(args, static_cast<int>(head));
  });
}

}  // namespace kdecode::KD_NS
