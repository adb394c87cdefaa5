#include "cpu.h"

#include <cstring>

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

// SiLU of the convolution at `count` channels. samples: four rows of raw samples, oldest first.
void convolve(const float* taps, std::int64_t tap_stride, const bf16* const* samples, int count, bf16* __restrict out) {
  const float* const tap[4] = {taps, taps + tap_stride, taps + 2 * tap_stride, taps + 3 * tap_stride};
  const bf16* const oldest = samples[0];
  const bf16* const second = samples[1];
  const bf16* const third = samples[2];
  const bf16* const newest = samples[3];
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    float y = widen(oldest[i]) * tap[0][i];
    y = mul_add(widen(second[i]), tap[1][i], y);
    y = mul_add(widen(third[i]), tap[2][i], y);
    y = mul_add(widen(newest[i]), tap[3][i], y);
    out[i] = round_bf16(silu(y));
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

// One row of one head for the delta rule: unit vectors, decay, and both vectors that read the state before its decay.
struct HeadRow {
  alignas(64) float k_unit[kMaxKdaHeadDim];
  alignas(64) float decay[kMaxKdaHeadDim];
  alignas(64) float q_kept[kMaxKdaHeadDim];
  alignas(64) float k_kept[kMaxKdaHeadDim];
  alignas(64) float u[kMaxKdaHeadDim];
  float along;  // q k
  float beta;
  const bf16* v;
  bf16* out;
};

void prepare_row(const bf16* q, const bf16* k, const float* log_decay, int dim, HeadRow& row) {
  alignas(64) float q_unit[kMaxKdaHeadDim];
  normalise(q, dim, 1.0f / __builtin_sqrtf(static_cast<float>(dim)), q_unit);
  normalise(k, dim, 1.0f, row.k_unit);
  for (int i = 0; i < dim; ++i) {
    row.decay[i] = exp(log_decay[i]);
    row.q_kept[i] = q_unit[i] * row.decay[i];
    row.k_kept[i] = row.k_unit[i] * row.decay[i];
  }
  row.along = dot(q_unit, row.k_unit, dim);
}

// The correction and the rounded read-out of `count` columns, from what both vectors read there.
inline void finish_columns(HeadRow& row, int column, int count, const float* read_k, const float* read_q) {
  for (int i = 0; i < count; ++i) {
    const float u = row.beta * (widen(row.v[column + i]) - read_k[i]);
    row.u[column + i] = u;
    row.out[column + i] = round_bf16(mul_add(row.along, u, read_q[i]));
  }
}

// One token of one head.
void delta_rule(HeadRow& row, int dim, float* state) {
  alignas(64) float read_q[kMaxKdaHeadDim], read_k[kMaxKdaHeadDim];
  // The state is read once for both: what the new one gives q is what the decayed one gives, plus (q k) u.
  read_state(state, dim, row.k_kept, row.q_kept, read_k, read_q);
  finish_columns(row, 0, dim, read_k, read_q);
  update_state(state, dim, row.decay, row.k_unit, row.u);
}

// All rows of a run over N vectors of the state's columns: [dim, N * kLanes] in `stripe`, which stays in the first-level cache
// and is left before the last row's update. An element of the state goes through the operations of `delta_rule`, in their order,
// so that its bits do not depend on the form.
template <int N>
void run_stripe(HeadRow* rows, int count, int dim, int column, float* stripe) {
  for (int r = 0; r < count; ++r) {
    vec by_k[N] = {}, by_q[N] = {};
    const HeadRow& row = rows[r];
    if (r == 0) {
      for (int i = 0; i < dim; ++i) {
        const vec ki = splat(row.k_kept[i]), qi = splat(row.q_kept[i]);
        for (int n = 0; n < N; ++n) {
          const vec s = load(stripe + (i * N + n) * kLanes);
          by_k[n] = mul_add(ki, s, by_k[n]);
          by_q[n] = mul_add(qi, s, by_q[n]);
        }
      }
    } else {
      const HeadRow& last = rows[r - 1];
      vec u[N];
      for (int n = 0; n < N; ++n) u[n] = load(last.u + column + n * kLanes);
      for (int i = 0; i < dim; ++i) {
        const vec kept = splat(last.decay[i]), added = splat(last.k_unit[i]);
        const vec ki = splat(row.k_kept[i]), qi = splat(row.q_kept[i]);
        for (int n = 0; n < N; ++n) {
          float* const at = stripe + (i * N + n) * kLanes;
          const vec s = mul_add(added, u[n], kept * load(at));
          store(at, s);
          by_k[n] = mul_add(ki, s, by_k[n]);
          by_q[n] = mul_add(qi, s, by_q[n]);
        }
      }
    }
    alignas(64) float read_k[N * kLanes], read_q[N * kLanes];
    for (int n = 0; n < N; ++n) store(read_k + n * kLanes, by_k[n]), store(read_q + n * kLanes, by_q[n]);
    finish_columns(rows[r], column, N * kLanes, read_k, read_q);
  }
}

// Consecutive tokens of one slot, whose state is only read. `stripes` is scratch of dim * dim numbers.
void delta_rules(HeadRow* rows, int count, int dim, const float* state, float* stripes) {
  constexpr int kWide = 32;  // columns: two lines of memory
  constexpr int kNarrow = kTileRows;
  // Copied in the order of memory, which the prefetcher follows, into stripes one behind the other.
  for (int i = 0; i < dim; ++i) {
    int v = 0;
    for (; v + kWide <= dim; v += kWide) std::memcpy(stripes + v * dim + i * kWide, state + i * dim + v, kWide * sizeof(float));
    if (v < dim) std::memcpy(stripes + v * dim + i * kNarrow, state + i * dim + v, kNarrow * sizeof(float));
  }
  int v = 0;
  for (; v + kWide <= dim; v += kWide) run_stripe<kWide / kLanes>(rows, count, dim, v, stripes + v * dim);
  if (v < dim) run_stripe<kNarrow / kLanes>(rows, count, dim, v, stripes + v * dim);
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
void head_gates(const KdaFrontArgs& args, int head, Worker& worker) {
  const Columns columns(args);
  const int dim = args.head_dim, rows = args.mix.rows;
  const std::int64_t proj_width = args.in_proj.rows;
  Rows in(worker, args.kda_proj + columns.decay, rows, proj_width);
  const float scale = args.decay_scale[head];
  float sums[kMaxRows * kTileRows];
  for (int start = 0; start < dim; start += kTileRows) {
    const std::int64_t channel = std::int64_t{head} * dim + start;
    tile_dot(args.f_b, channel / kTileRows, in, sums);
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

// The raw samples that the rows [first, last) of one slot see at a channel: its window, then theirs.
struct Samples {
  Samples(const KdaFrontArgs& args, int first, int last, std::int64_t channel) {
    const std::int64_t stride = 3 * std::int64_t{args.heads} * args.head_dim;
    const bf16* const window = args.window + args.row_slot[first] * 3 * stride + channel;
    for (int j = 0; j < 3; ++j) at[j] = window + j * stride;
    for (int r = first; r < last; ++r) at[3 + r - first] = args.kda_proj + std::int64_t{r} * args.in_proj.rows + channel;
  }
  const bf16* at[3 + kMaxRows];
};

// The convolution of one head, and its window moved on or its samples recorded.
void convolve_run(const KdaFrontArgs& args, int head, int first, int last) {
  const int dim = args.head_dim;
  const std::int64_t width = std::int64_t{args.heads} * dim;
  for (int group = 0; group < 3; ++group) {
    const std::int64_t channel = group * width + std::int64_t{head} * dim;
    const Samples samples(args, first, last, channel);
    for (int r = first; r < last; ++r) {
      convolve(args.conv + channel, 3 * width, samples.at + (r - first), dim, args.kda_qkv + r * 3 * width + channel);
      if (args.samples != nullptr) std::memcpy(args.samples + r * 3 * width + channel, samples.at[3 + r - first], dim * sizeof(bf16));
    }
    if (args.samples != nullptr) continue;
    bf16* const window = args.window + args.row_slot[first] * 9 * width + channel;
    // Oldest first: a sample that stays in the window is read before its place is written.
    for (int j = 0; j < 3; ++j) std::memcpy(window + j * 3 * width, samples.at[last - first + j], dim * sizeof(bf16));
  }
}

// The delta rule of one head over the rows [first, last) of one slot.
void delta_rule_run(const KdaFrontArgs& args, int head, int first, int last) {
  const int dim = args.head_dim;
  const std::int64_t width = std::int64_t{args.heads} * dim, channel = std::int64_t{head} * dim;
  float* const state = args.state + (std::int64_t{args.row_slot[first]} * args.heads + head) * dim * dim;
  const bool is_recorded = args.keys != nullptr;
  HeadRow rows[kMaxVerifyRows];
  for (int r = first; r < last; ++r) {
    const bf16* const qkv = args.kda_qkv + r * 3 * width + channel;
    HeadRow& row = rows[is_recorded ? r - first : 0];
    row.beta = args.kda_beta[r * args.heads + head];
    row.v = qkv + 2 * width;
    row.out = args.kda_out + r * width + channel;
    prepare_row(qkv, qkv + width, args.kda_decay + r * width + channel, dim, row);
    if (!is_recorded) delta_rule(row, dim, state);
  }
  if (!is_recorded) return;
  alignas(64) float stripes[kMaxKdaHeadDim * kMaxKdaHeadDim];
  delta_rules(rows, last - first, dim, state, stripes);
  for (int r = first; r < last; ++r) {
    const std::int64_t at = r * width + channel;
    std::memcpy(args.keys + at, rows[r - first].k_unit, dim * sizeof(float));
    std::memcpy(args.decays + at, args.kda_decay + at, dim * sizeof(float));
    std::memcpy(args.corrections + at, rows[r - first].u, dim * sizeof(float));
  }
}

// One head of all rows, in row order: rows of one slot are consecutive tokens.
void run_head(const KdaFrontArgs& args, int head, Worker& worker) {
  const Columns columns(args);
  const int dim = args.head_dim, rows = args.mix.rows;
  const std::int64_t width = columns.width, proj_width = args.in_proj.rows;
  const std::int64_t channel = std::int64_t{head} * dim;
  head_gates(args, head, worker);
  const bool has_low_rank_gate = args.g_b.data != nullptr;
  bf16 low_rank_gate[kMaxRows * kMaxKdaHeadDim];
  if (has_low_rank_gate) {
    Rows in(worker, args.kda_proj + columns.gate, rows, proj_width);
    float sums[kMaxRows * kTileRows];
    for (int start = 0; start < dim; start += kTileRows) {
      tile_dot(args.g_b, (channel + start) / kTileRows, in, sums);
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < kTileRows; ++i) low_rank_gate[r * dim + start + i] = round_bf16(sums[r * kTileRows + i]);
      }
    }
  }
  for (int first = 0, last = 0; first < rows; first = last) {
    while (last < rows && args.row_slot[last] == args.row_slot[first]) ++last;
    convolve_run(args, head, first, last);
    delta_rule_run(args, head, first, last);
  }
  for (int r = 0; r < rows; ++r) {
    const bf16* const gate = has_low_rank_gate ? low_rank_gate + r * dim : args.kda_proj + r * proj_width + columns.gate + channel;
    const std::int64_t at = r * width + channel;
    gated_norm(args.kda_out + at, args.out_norm, args.mix.eps, gate, dim, args.attn_out + at);
  }
}

}  // namespace

void kda_front(const KdaFrontArgs& args, Worker& worker) {
  const int rows = args.mix.rows;
  mix_norm(args.mix, worker);

  Rows in(worker, args.mix.norm_out, rows, args.in_proj.cols);
  linear_tiles(args.in_proj, in, args.kda_proj, worker);
  worker.barrier();

  worker.split(args.heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t head = first; head < last; ++head) run_head(args, static_cast<int>(head), worker);
  });
}

}  // namespace kdecode::KD_NS
