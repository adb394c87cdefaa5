#include "cpu.h"

#include <algorithm>
#include <vector>

#include "../common/small_product.h"
#include "../common/vmath.h"

namespace kdecode::KD_NS {
namespace {

constexpr std::int64_t kChunk = 64;
constexpr std::int64_t kSub = 16;  // tokens of a sub-block
constexpr std::int64_t kSubs = kChunk / kSub;
constexpr float kL2Eps = 1e-6f;

float dot(const float* x, const float* y, std::int64_t count) {
  vec total{};
  for (std::int64_t i = 0; i < count; i += kLanes) total = mul_add(load(x + i), load(y + i), total);
  return sum(total);
}

// One head, a chunk at a time; all numbers of a chunk stay in the second-level cache. Exponents of decays are never above 0:
// between sub-blocks both factors of e^{G_i - G_j} are taken at the borders between them, inside one the differences themselves.
class Head {
 public:
  explicit Head(std::int64_t dim) : dim_(dim), memory_(7 * kChunk * dim + 2 * kChunk * kChunk + (kSubs + 1) * dim + (2 * kSub + 1) * dim) {
    float* next = memory_.data();
    const auto take = [&](std::int64_t count) { return next += count, next - count; };
    for (float** rows : {&q_, &k_, &inner_, &grown_q_, &grown_k_, &left_k_, &u_}) *rows = take(kChunk * dim);
    pairs_ = take(kChunk * kChunk), reads_ = take(kChunk * kChunk);
    before_ = take((kSubs + 1) * dim);
    turned_ = take(kSub * dim), scaled_ = take(kSub * dim), line_ = take(dim);
  }

  void run(const DeltaRuleArgs& args, std::int64_t head) {
    float* const state = args.state + head * dim_ * dim_;
    for (std::int64_t first = 0; first < args.tokens; first += kChunk) {
      const std::int64_t count = std::min(kChunk, args.tokens - first);
      subs_ = (count + kSub - 1) / kSub;
      read_tokens(args, head, first, count);
      grow();
      multiply_pairs();
      solve(args, head, first, count, state);
      write_tokens(args, head, first, count, state);
      move_state(state);
    }
  }

 private:
  // q, k normalised, v in u_, the decays of each sub-block summed up; rows behind `count` are 0 and do not decay.
  void read_tokens(const DeltaRuleArgs& args, std::int64_t head, std::int64_t first, std::int64_t count) {
    std::fill_n(before_, dim_, 0.0f);
    for (std::int64_t t = 0; t < subs_ * kSub; ++t) {
      const std::int64_t at = t * dim_;
      float* const inner = inner_ + at;
      if (t < count) {
        const bf16* const qkv = args.qkv + ((first + t) * 3 * args.heads + head) * dim_;
        normalise(qkv, 1.0f / __builtin_sqrtf(static_cast<float>(dim_)), q_ + at);
        normalise(qkv + args.heads * dim_, 1.0f, k_ + at);
        for (std::int64_t c = 0; c < dim_; ++c) u_[at + c] = widen(qkv[2 * args.heads * dim_ + c]);
        std::copy_n(args.decay + ((first + t) * args.heads + head) * dim_, dim_, inner);
      } else {
        for (float* const rows : {q_, k_, u_, inner_}) std::fill_n(rows + at, dim_, 0.0f);
      }
      if (t % kSub != 0) {
        for (std::int64_t c = 0; c < dim_; ++c) inner[c] += inner[c - dim_];
      }
      if (t % kSub == kSub - 1) {
        float* const before = before_ + (t / kSub) * dim_;
        for (std::int64_t c = 0; c < dim_; ++c) before[dim_ + c] = before[c] + inner[c];
      }
    }
  }

  void normalise(const bf16* x, float scale, float* out) const {
    for (std::int64_t c = 0; c < dim_; ++c) out[c] = widen(x[c]);
    const float factor = scale / __builtin_sqrtf(dot(out, out, dim_) + kL2Eps);
    for (std::int64_t c = 0; c < dim_; ++c) out[c] *= factor;
  }

  // q and k from their sub-block's first token on, and k until its last.
  void grow() {
    for (std::int64_t t = 0; t < subs_ * kSub; ++t) {
      const std::int64_t at = t * dim_;
      const float* const last = inner_ + (t / kSub * kSub + kSub - 1) * dim_;
      // None of these overlap, which is more than the compiler would check for.
#pragma GCC ivdep
      for (std::int64_t c = 0; c < dim_; ++c) {
        const float grown = exp(inner_[at + c]);
        grown_q_[at + c] = q_[at + c] * grown;
        grown_k_[at + c] = k_[at + c] * grown;
        left_k_[at + c] = k_[at + c] * exp(last[c] - inner_[at + c]);
      }
    }
  }

  // pairs: <k_i, k_j e^{G_i - G_j}> for j < i; reads: <q_i, k_j e^{G_i - G_j}> for j <= i.
  void multiply_pairs() {
    for (std::int64_t a = 0; a < subs_; ++a) {
      multiply_diagonal(a);
      if (a + 1 == subs_) continue;
      for (std::int64_t j = 0; j < kSub; ++j) {
        for (std::int64_t c = 0; c < dim_; ++c) turned_[c * kSub + j] = left_k_[(a * kSub + j) * dim_ + c];
      }
      for (std::int64_t b = a + 1; b < subs_; ++b) {
        const float* const end = before_ + (a + 1) * dim_;
        const float* const begin = before_ + b * dim_;
        for (std::int64_t c = 0; c < dim_; ++c) line_[c] = exp(begin[c] - end[c]);
        for (std::int64_t c = 0; c < dim_; ++c) {
          for (std::int64_t j = 0; j < kSub; ++j) scaled_[c * kSub + j] = turned_[c * kSub + j] * line_[c];
        }
        const std::int64_t at = b * kSub * kChunk + a * kSub, rows = b * kSub * dim_;
        product<Sum::kSet>(kSub, kSub, dim_, {grown_k_ + rows, dim_, 1}, {scaled_, kSub}, pairs_ + at, kChunk);
        product<Sum::kSet>(kSub, kSub, dim_, {grown_q_ + rows, dim_, 1}, {scaled_, kSub}, reads_ + at, kChunk);
      }
    }
  }

  void multiply_diagonal(std::int64_t sub) {
    const std::int64_t first = sub * kSub;
    for (std::int64_t i = 0; i < kSub; ++i) {
      const std::int64_t row = (first + i) * dim_;
      for (std::int64_t j = 0; j <= i; ++j) {
        const std::int64_t other = (first + j) * dim_;
        for (std::int64_t c = 0; c < dim_; ++c) line_[c] = exp(inner_[row + c] - inner_[other + c]) * k_[other + c];
        const std::int64_t at = (first + i) * kChunk + first + j;
        pairs_[at] = dot(line_, k_ + row, dim_);
        reads_[at] = dot(line_, q_ + row, dim_);
      }
      for (std::int64_t j = i + 1; j < kSub; ++j) reads_[(first + i) * kChunk + first + j] = 0.0f;
    }
  }

  // u: what each token adds to its key's row of the state, given the state before the chunk.
  void solve(const DeltaRuleArgs& args, std::int64_t head, std::int64_t first, std::int64_t count, const float* state) {
    for (std::int64_t b = 1; b < subs_; ++b) {
      for (std::int64_t c = 0; c < dim_; ++c) line_[c] = exp(before_[b * dim_ + c]);
      for (std::int64_t t = b * kSub; t < (b + 1) * kSub; ++t) {
        for (std::int64_t c = 0; c < dim_; ++c) {
          grown_q_[t * dim_ + c] *= line_[c];
          grown_k_[t * dim_ + c] *= line_[c];
        }
      }
    }
    product<Sum::kSubtract>(subs_ * kSub, dim_, dim_, {grown_k_, dim_, 1}, {state, dim_}, u_, dim_);
    for (std::int64_t b = 0; b < subs_; ++b) {
      const std::int64_t start = b * kSub;
      product<Sum::kSubtract>(kSub, dim_, start, {pairs_ + start * kChunk, kChunk, 1}, {u_, dim_}, u_ + start * dim_, dim_);
      for (std::int64_t i = start; i < start + kSub; ++i) {
        float* const u = u_ + i * dim_;
        for (std::int64_t j = start; j < i; ++j) {
          const float pair = pairs_[i * kChunk + j];
          for (std::int64_t c = 0; c < dim_; ++c) u[c] = mul_add(-pair, u_[j * dim_ + c], u[c]);
        }
        const float beta = i < count ? args.beta[(first + i) * args.heads + head] : 0.0f;
        for (std::int64_t c = 0; c < dim_; ++c) u[c] *= beta;
      }
    }
  }

  void write_tokens(const DeltaRuleArgs& args, std::int64_t head, std::int64_t first, std::int64_t count, const float* state) {
    float* const reads = inner_;  // not needed any more
    product<Sum::kSet>(subs_ * kSub, dim_, dim_, {grown_q_, dim_, 1}, {state, dim_}, reads, dim_);
    for (std::int64_t b = 0; b < subs_; ++b) {
      const std::int64_t start = b * kSub;
      product<Sum::kAdd>(kSub, dim_, start + kSub, {reads_ + start * kChunk, kChunk, 1}, {u_, dim_}, reads + start * dim_, dim_);
    }
    for (std::int64_t t = 0; t < count; ++t) {
      bf16* const out = args.out + ((first + t) * args.heads + head) * dim_;
      for (std::int64_t c = 0; c < dim_; ++c) out[c] = round_bf16(reads[t * dim_ + c]);
    }
  }

  // S = diag(e^{G_last}) S + sum_j (k_j e^{G_last - G_j}) u_j^T.
  void move_state(float* state) {
    const float* const all = before_ + subs_ * dim_;
    for (std::int64_t b = 0; b < subs_; ++b) {
      for (std::int64_t c = 0; c < dim_; ++c) line_[c] = exp(all[c] - before_[(b + 1) * dim_ + c]);
      for (std::int64_t t = b * kSub; t < (b + 1) * kSub; ++t) {
        for (std::int64_t c = 0; c < dim_; ++c) left_k_[t * dim_ + c] *= line_[c];
      }
    }
    for (std::int64_t c = 0; c < dim_; ++c) {
      const float kept = exp(all[c]);
      for (std::int64_t v = 0; v < dim_; ++v) state[c * dim_ + v] *= kept;
    }
    product<Sum::kAdd>(dim_, dim_, subs_ * kSub, {left_k_, 1, dim_}, {u_, dim_}, state, dim_);
  }

  std::int64_t dim_, subs_ = 0;
  std::vector<float> memory_;
  float *q_, *k_, *inner_, *grown_q_, *grown_k_, *left_k_, *u_;  // [kChunk, dim]
  float *pairs_, *reads_;                                        // [kChunk, kChunk]
  float* before_;                      // [kSubs + 1, dim]: decays of the chunk before each sub-block
  float *turned_, *scaled_, *line_;    // scratch
};

}  // namespace

void delta_rule_chunks(const DeltaRuleArgs& args) {
#pragma omp parallel if (args.heads > 1)
  {
    Head head(args.head_dim);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t i = 0; i < args.heads; ++i) head.run(args, i);
  }
}

}  // namespace kdecode::KD_NS
