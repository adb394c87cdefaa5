// One round of attention for a block of lanes: scores, the online softmax, weighted sums of values.
//
// A lane is one query, of a head and a row. What a lane gets depends on its own query and on the tokens, in their order, and on
// nothing in the other lanes: so lanes may be put together as it suits.
#pragma once

#include <cstring>

#include "vec.h"
#include "vmath.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kLaneBlock = 16;
constexpr int kMaxQueryWidth = 1024;  // bound of scratch memory
constexpr int kTokenBlock = 64;  // tokens of one round; their rows stay in the second-level cache
// Scores of so many tokens are computed together; lists of tokens are filled up to a multiple of it.
constexpr int kScoreTokens = kLanes == 16 ? 4 : 2;
constexpr int kManyScoreTokens = 12;
static_assert(kTokenBlock % kScoreTokens == 0, "padding must stay inside the round");

// The cache rows of the next round, asked for a few at a time between the products of this one: into the second-level cache, which
// the hardware would not do, because it does not follow several rows at once.
struct Ahead {
  const char* row[kTokenBlock];
  int count = 0;  // of rows
  int bytes = 0;  // of a row
  int done = 0;

  // The rows up to the share `part` / `parts` of all.
  void ask(int part, int parts) {
    for (const int until = count * part / parts; done < until; ++done) {
      for (int byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row[done] + byte, 0, 2);
    }
  }
};

#if defined(__AVX512BF16__)

// Queries of a block as a tile, a line two columns of all lanes: a register of scores is then one token's, and nothing has to be
// added up across it.
class QueryBlock {
 public:
  // Missing lanes repeat the last one.
  void set(const bf16* const* query, int lanes, int width) {
    width_ = width;
    for (int lane = 0; lane < kLaneBlock; ++lane) {
      const bf16* const from = query[lane < lanes ? lane : lanes - 1];
      for (int column = 0; column < width; column += 2) {
        std::memcpy(tile_ + column * kLaneBlock + lane * 2, from + column, 2 * sizeof(bf16));
      }
    }
  }

  // scores[t * kLaneBlock + lane] = <query, token[t]> of `count` tokens, a multiple of kScoreTokens.
  void scores(const bf16* const* token, int count, float* scores) const {
    int t = 0;
    for (; t + kManyScoreTokens <= count; t += kManyScoreTokens) products<kManyScoreTokens>(token + t, scores + t * kLaneBlock);
    for (; t < count; t += kScoreTokens) products<kScoreTokens>(token + t, scores + t * kLaneBlock);
  }

 private:
  static vec add_pair(vec acc, __m512i queries, const bf16* x) {
    std::int32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return _mm512_dpbf16_ps(acc, (__m512bh)queries, (__m512bh)_mm512_set1_epi32(pair));
  }

  template <int T>
  void products(const bf16* const* token, float* scores) const {
    vec even[T] = {}, odd[T] = {};
    for (int column = 0; column < width_; column += 4) {
      const __m512i first = _mm512_load_si512(tile_ + column * kLaneBlock);
      const __m512i second = _mm512_load_si512(tile_ + column * kLaneBlock + 32);
      for (int t = 0; t < T; ++t) {
        even[t] = add_pair(even[t], first, token[t] + column);
        odd[t] = add_pair(odd[t], second, token[t] + column + 2);
      }
    }
    for (int t = 0; t < T; ++t) store(scores + t * kLaneBlock, even[t] + odd[t]);
  }

  int width_ = 0;
  alignas(64) bf16 tile_[kMaxQueryWidth * kLaneBlock];
};

#else

class QueryBlock {
 public:
  void set(const bf16* const* query, int lanes, int width) {
    width_ = width;
    lanes_ = lanes;
    for (int lane = 0; lane < kLaneBlock; ++lane) query_[lane] = query[lane < lanes ? lane : lanes - 1];
  }

  void scores(const bf16* const* token, int count, float* scores) const {
    for (int t = 0; t < count; t += kScoreTokens) {
      for (int lane = 0; lane < lanes_; lane += kScoreLanes) products(lane, token + t, scores + t * kLaneBlock + lane);
    }
  }

 private:
  static constexpr int kScoreLanes = 4;

  void products(int lane, const bf16* const* token, float* scores) const {
    vec acc[kScoreTokens][kScoreLanes] = {};
    for (int column = 0; column < width_; column += kLanes) {
      vec q[kScoreLanes];
      for (int i = 0; i < kScoreLanes; ++i) q[i] = load(query_[lane + i] + column);
      for (int t = 0; t < kScoreTokens; ++t) {
        const vec x = load(token[t] + column);
        for (int i = 0; i < kScoreLanes; ++i) acc[t][i] = mul_add(x, q[i], acc[t][i]);
      }
    }
    for (int t = 0; t < kScoreTokens; ++t) sum_each(acc[t], scores + t * kLaneBlock);
  }

  int width_ = 0, lanes_ = 0;
  const bf16* query_[kLaneBlock];
};

#endif

// The online softmax of a block of lanes; lanes that do not exist are computed and not used.
struct Softmax {
  float highest[kLaneBlock];
  float total[kLaneBlock];
  float kept[kLaneBlock];  // factor of everything summed before the latest round

  Softmax() {
    for (int i = 0; i < kLaneBlock; ++i) highest[i] = -__builtin_inff(), total[i] = 0.0f;
  }

  // Turns `count` scores a lane into weights relative to the highest score so far.
  void round(float* scores, int count, float scale) {
    const int numbers = count * kLaneBlock;
    alignas(64) float top[kLaneBlock];
    for (int i = 0; i < kLaneBlock; i += kLanes) {
      vec most = load(highest + i);
      for (int at = i; at < numbers; at += kLaneBlock) {
        const vec score = load(scores + at) * splat(scale);
        store(scores + at, score);
        most = score > most ? score : most;
      }
      store(top + i, most);
    }
    for (int i = 0; i < kLaneBlock; ++i) kept[i] = exp(highest[i] - top[i]);
    for (int at = 0; at < numbers; at += kLaneBlock) {
      float* const line = scores + at;
      for (int i = 0; i < kLaneBlock; ++i) line[i] = exp(line[i] - top[i]);
    }
    for (int i = 0; i < kLaneBlock; i += kLanes) {
      vec sum = load(total + i) * load(kept + i);
      for (int at = i; at < numbers; at += kLaneBlock) sum = sum + load(scores + at);
      store(total + i, sum);
      store(highest + i, load(top + i));
    }
  }
};

// The weights of one round and what they are summed into.
struct Weighted {
  const bf16* const* token;  // its value
  int count;
  const float* weights;  // [count, kLaneBlock]
  const float* kept;     // [kLaneBlock]
  float* const* sums;    // of each lane
  bool is_first;         // nothing is in `sums` yet
};

// sums[lane][column...] = kept[lane] * sums[lane] + sum_t weights[t][lane] * token[t][column...] of L lanes and N vectors of columns.
template <int L, int N>
inline void add_values(const Weighted& w, int lane, int column) {
  vec acc[L][N] = {};
  if (!w.is_first) {
    for (int i = 0; i < L; ++i) {
      for (int n = 0; n < N; ++n) acc[i][n] = splat(w.kept[lane + i]) * load(w.sums[lane + i] + column + n * kLanes);
    }
  }
  for (int t = 0; t < w.count; ++t) {
    vec x[N];
    for (int n = 0; n < N; ++n) x[n] = load(w.token[t] + column + n * kLanes);
    for (int i = 0; i < L; ++i) {
      const vec weight = splat(w.weights[t * kLaneBlock + lane + i]);
      for (int n = 0; n < N; ++n) acc[i][n] = mul_add(weight, x[n], acc[i][n]);
    }
  }
  for (int i = 0; i < L; ++i) {
    for (int n = 0; n < N; ++n) store(w.sums[lane + i] + column + n * kLanes, acc[i][n]);
  }
}

// N vectors of columns for all lanes.
template <int N>
inline void add_columns(const Weighted& w, int lanes, int column) {
  int lane = 0;
#if defined(__AVX512BF16__)
  for (; lane + 8 <= lanes; lane += 8) add_values<8, N>(w, lane, column);
#endif
  for (; lane + 4 <= lanes; lane += 4) add_values<4, N>(w, lane, column);
  for (; lane < lanes; ++lane) add_values<1, N>(w, lane, column);
}

inline void add_round(const Weighted& w, int lanes, int rank, Ahead& ahead) {
  constexpr int kWide = kLanes == 16 ? 3 : 2;  // with 8 lanes, or 4, as many sums as there are registers for
  int column = 0;
  for (; column + kWide * kLanes <= rank; column += kWide * kLanes) {
    add_columns<kWide>(w, lanes, column);
    ahead.ask(column + kWide * kLanes, rank);
  }
  for (; column + 2 * kLanes <= rank; column += 2 * kLanes) add_columns<2>(w, lanes, column);
  for (; column < rank; column += kLanes) add_columns<1>(w, lanes, column);
  ahead.ask(1, 1);
}

}  // namespace
}  // namespace kdecode::KD_NS
