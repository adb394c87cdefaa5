#include "cpu.h"

#include <cstring>

#include "../common/tile_ops.h"
#include "../common/vec.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kHeadBlock = 16;   // heads that share one pass over the cache
constexpr int kTokenBlock = 64;  // tokens of one round of the online softmax; their rows stay in the second-level cache
constexpr int kScoreHeads = 4;
constexpr int kScoreTokens = kLanes == 16 ? 4 : 2;
constexpr int kPrefetchTokens = 8;  // how far ahead of the scores rows are asked for; the hardware follows four rows at once badly
constexpr int kSumHeads = kLanes == 16 ? 8 : 4;

static_assert(kTokenBlock % kScoreTokens == 0 && kHeadBlock % kScoreHeads == 0, "padding must stay inside the block");

struct Shape {
  explicit Shape(const MlaFrontArgs& args)
      : cache_width(args.kv_rank + args.rope_dim),
        qk_dim(args.nope_dim + args.rope_dim),
        query_width(args.q_b.data != nullptr ? args.q_b.cols : std::int64_t{args.heads} * qk_dim) {}
  int cache_width, qk_dim;
  std::int64_t query_width;  // columns of the query in mla_proj; the latent comes next
};

inline std::int64_t cache_row(const MlaFrontArgs& args, int row, std::int64_t token) {
  const std::int64_t page = args.row_pages[std::int64_t{row} * args.max_pages + token / args.page_tokens];
  return page * args.page_tokens + token % args.page_tokens;
}

// The row's own cache row: normed latent, then the rope part as it is.
void insert_row(const MlaFrontArgs& args, int row) {
  const Shape shape(args);
  const bf16* const latent = args.mla_proj + row * args.in_proj.rows + shape.query_width;
  const std::int64_t at = cache_row(args, row, args.row_position[row]) * shape.cache_width;
  bf16 wide[kMaxMlaWidth];
  bf16* const out = args.fp8_values == nullptr ? static_cast<bf16*>(args.pages) + at : wide;
  rms_norm_row(latent, args.kv_norm, args.latent_eps, args.kv_rank, out);
  std::memcpy(out + args.kv_rank, latent + args.kv_rank, args.rope_dim * sizeof(bf16));
  if (args.fp8_values == nullptr) return;
  fp8* const codes = static_cast<fp8*>(args.pages) + at;
  for (int i = 0; i < shape.cache_width; ++i) codes[i] = round_fp8(widen(wide[i]) / args.fp8_scale);
}

// Query norm of the row (with q LoRA).
void norm_query(const MlaFrontArgs& args, int row) {
  if (args.q_b.data == nullptr) return;
  const std::int64_t rank = args.q_b.cols;
  rms_norm_row(args.mla_proj + row * args.in_proj.rows, args.q_norm, args.latent_eps, rank, args.query_norm + row * rank);
}

// mla_query of one head, all rows: q_b, then W_UK transposed.
void query_head(const MlaFrontArgs& args, int head) {
  const Shape shape(args);
  const int rows = args.mix.rows;
  bf16 queries[kMaxRows * kMaxMlaHeadDim];
  const bf16* query[kMaxRows];
  float sums[kMaxRows * kTileRows];
  if (args.q_b.data != nullptr) {
    const Rows in(args.query_norm, rows, args.q_b.cols);
    for (int start = 0; start < shape.qk_dim; start += kTileRows) {
      tile_dot(args.q_b, (std::int64_t{head} * shape.qk_dim + start) / kTileRows, rows, in.at, sums);
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < kTileRows; ++i) queries[r * shape.qk_dim + start + i] = round_bf16(sums[r * kTileRows + i]);
      }
    }
    for (int r = 0; r < rows; ++r) query[r] = queries + r * shape.qk_dim;
  } else {
    for (int r = 0; r < rows; ++r) query[r] = args.mla_proj + r * args.in_proj.rows + std::int64_t{head} * shape.qk_dim;
  }
  for (int start = 0; start < args.kv_rank; start += kTileRows) {
    tile_dot(args.w_uk, (std::int64_t{head} * args.kv_rank + start) / kTileRows, rows, query, sums);
    for (int r = 0; r < rows; ++r) {
      bf16* const out = args.mla_query + (std::int64_t{r} * args.heads + head) * shape.cache_width + start;
      for (int i = 0; i < kTileRows; ++i) out[i] = round_bf16(sums[r * kTileRows + i]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    bf16* const out = args.mla_query + (std::int64_t{r} * args.heads + head) * shape.cache_width + args.kv_rank;
    std::memcpy(out, query[r] + args.nope_dim, args.rope_dim * sizeof(bf16));
  }
}

#if defined(__AVX512BF16__)
constexpr int kScoreColumns = 32;
using Columns = __m512i;
inline Columns load_columns(const bf16* x) { return _mm512_loadu_si512(x); }
// The first 16 columns; the others are zero.
inline Columns load_half(const bf16* x) { return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
inline vec add_products(vec acc, Columns x, Columns y) { return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)y); }
#else
constexpr int kScoreColumns = kLanes;
using Columns = vec;
inline Columns load_columns(const bf16* x) { return load(x); }
inline Columns load_half(const bf16* x) { return load(x); }  // never needed: 16 is a multiple of kScoreColumns
inline vec add_products(vec acc, Columns x, Columns y) { return mul_add(x, y, acc); }
#endif

template <Columns (*kLoad)(const bf16*)>
inline void score_columns(const bf16* const* query, const bf16* const* token, int column, vec (&acc)[kScoreTokens][kScoreHeads]) {
  Columns q[kScoreHeads];
  for (int h = 0; h < kScoreHeads; ++h) q[h] = kLoad(query[h] + column);
  for (int t = 0; t < kScoreTokens; ++t) {
    const Columns x = kLoad(token[t] + column);
    for (int h = 0; h < kScoreHeads; ++h) acc[t][h] = add_products(acc[t][h], x, q[h]);
  }
}

// scores[t][h] = <query[h], token[t]> of kScoreHeads heads and kScoreTokens tokens; `width` is a multiple of 16.
inline void score_tile(const bf16* const* query, const bf16* const* token, int width, float* scores) {
  vec acc[kScoreTokens][kScoreHeads] = {};
  int column = 0;
  for (; column + kScoreColumns <= width; column += kScoreColumns) score_columns<load_columns>(query, token, column, acc);
  if (column < width) score_columns<load_half>(query, token, column, acc);
  for (int t = 0; t < kScoreTokens; ++t) sum_each(acc[t], scores + t * kHeadBlock);
}

// Asks for a cache row, into the second-level cache.
inline void prefetch_row(const bf16* row, int width) {
  constexpr int kLineNumbers = 64 / sizeof(bf16);
  for (int column = 0; column < width; column += kLineNumbers) __builtin_prefetch(row + column, 0, 2);
}

// sums[h][column...] = kept[h] * sums[h] + sum_t weights[t][h] * token[t][column...] of H heads and N vectors of columns.
template <int H, int N>
inline void add_latents(const bf16* const* token, int count, int column, const float* weights, const float* kept, bool is_first,
                        float* sums, std::int64_t stride) {
  vec acc[H][N] = {};
  if (!is_first) {
    for (int h = 0; h < H; ++h) {
      for (int n = 0; n < N; ++n) acc[h][n] = splat(kept[h]) * load(sums + h * stride + column + n * kLanes);
    }
  }
  for (int t = 0; t < count; ++t) {
    vec x[N];
    for (int n = 0; n < N; ++n) x[n] = load(token[t] + column + n * kLanes);
    for (int h = 0; h < H; ++h) {
      const vec weight = splat(weights[t * kHeadBlock + h]);
      for (int n = 0; n < N; ++n) acc[h][n] = mul_add(weight, x[n], acc[h][n]);
    }
  }
  for (int h = 0; h < H; ++h) {
    for (int n = 0; n < N; ++n) store(sums + h * stride + column + n * kLanes, acc[h][n]);
  }
}

// One vector, or two, of columns for all heads of the block.
template <int N>
inline void add_columns(const bf16* const* token, int count, int column, int heads, const float* weights, const float* kept,
                        bool is_first, float* sums, std::int64_t stride) {
  int h = 0;
  for (; h + kSumHeads <= heads; h += kSumHeads) {
    add_latents<kSumHeads, N>(token, count, column, weights + h, kept + h, is_first, sums + h * stride, stride);
  }
  for (; h < heads; ++h) {
    add_latents<1, N>(token, count, column, weights + h, kept + h, is_first, sums + h * stride, stride);
  }
}

// The online softmax of a block of heads; lanes above the number of heads are computed and not used.
struct Softmax {
  float highest[kHeadBlock];
  float total[kHeadBlock];
  float kept[kHeadBlock];  // factor of everything summed before the latest round

  Softmax() {
    for (int h = 0; h < kHeadBlock; ++h) highest[h] = -__builtin_inff(), total[h] = 0.0f;
  }

  // Turns `count` scores a head into weights relative to the highest score so far.
  void round(float* scores, int count, float scale) {
    float top[kHeadBlock];
    for (int h = 0; h < kHeadBlock; ++h) top[h] = highest[h];
    for (int t = 0; t < count; ++t) {
      float* const line = scores + t * kHeadBlock;
      for (int h = 0; h < kHeadBlock; ++h) {
        line[h] *= scale;
        top[h] = line[h] > top[h] ? line[h] : top[h];
      }
    }
    for (int h = 0; h < kHeadBlock; ++h) {
      kept[h] = exp(highest[h] - top[h]);
      highest[h] = top[h];
      total[h] *= kept[h];
    }
    for (int t = 0; t < count; ++t) {
      float* const line = scores + t * kHeadBlock;
      for (int h = 0; h < kHeadBlock; ++h) {
        line[h] = exp(line[h] - top[h]);
        total[h] += line[h];
      }
    }
  }
};

// out[i] = values[codes[i]], bf16. `values` is odd in the sign bit of the code; `count` is a multiple of 16.
inline void dequantise(const fp8* codes, const bf16* values, int count, bf16* out) {
#if defined(__AVX512BF16__)
  __m512i table[4];
  for (int i = 0; i < 4; ++i) table[i] = _mm512_loadu_si512(values + 32 * i);
  for (int i = 0; i < count; i += 32) {
    const __mmask32 mask = count - i >= 32 ? 0xffffffffu : 0xffffu;
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, codes + i));
    const __m512i low = _mm512_permutex2var_epi16(table[0], code, table[1]);
    const __m512i high = _mm512_permutex2var_epi16(table[2], code, table[3]);
    const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40)), low, high);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
    _mm512_mask_storeu_epi16(out + i, mask, _mm512_or_si512(magnitude, sign));
  }
#else
  for (int i = 0; i < count; ++i) out[i] = values[codes[i]];
#endif
}

// Addresses of `count` cache rows as bf16; those of an fp8 cache are dequantised into `wide`. The list is filled up to a multiple
// of kScoreTokens with the last row, so that nothing beyond the context is touched.
void gather_tokens(const MlaFrontArgs& args, int row, std::int64_t first, int count, int width, bf16* wide, const bf16** token) {
  for (int t = 0; t < count; ++t) {
    const std::int64_t at = cache_row(args, row, first + t) * width;
    if (args.fp8_values == nullptr) {
      token[t] = static_cast<const bf16*>(args.pages) + at;
      continue;
    }
    dequantise(static_cast<const fp8*>(args.pages) + at, args.fp8_values, width, wide + t * width);
    token[t] = wide + t * width;
  }
  for (int t = count; t % kScoreTokens != 0; ++t) token[t] = token[count - 1];
}

// One split of one row's context for the heads [first_head, first_head + heads).
void attend_split(const MlaFrontArgs& args, int row, int split, int first_head, int heads) {
  const Shape shape(args);
  const int width = shape.cache_width, rank = args.kv_rank;
  const std::int64_t length = std::int64_t{args.row_position[row]} + 1;
  const std::int64_t start = std::int64_t{split} * args.split_tokens;
  const std::int64_t end = start + args.split_tokens < length ? start + args.split_tokens : length;
  const std::int64_t slot = (std::int64_t{row} * args.max_splits + split) * args.heads + first_head;
  float* const sums = args.split_sums + slot * rank;
  // The last head stands in for the missing ones of an incomplete block.
  const bf16* query[kHeadBlock];
  for (int h = 0; h < kHeadBlock; ++h) {
    query[h] = args.mla_query + (std::int64_t{row} * args.heads + first_head + (h < heads ? h : heads - 1)) * width;
  }
  Softmax softmax;
  alignas(64) float scores[kTokenBlock * kHeadBlock] = {};
  alignas(64) bf16 wide[kTokenBlock * kMaxMlaWidth];
  const bf16* token[kTokenBlock];
  for (std::int64_t first = start; first < end; first += kTokenBlock) {
    const int count = static_cast<int>(end - first < kTokenBlock ? end - first : kTokenBlock);
    gather_tokens(args, row, first, count, width, wide, token);
    for (int t = 0; t < count; t += kScoreTokens) {
      for (int h = 0; h < heads; h += kScoreHeads) {
        // One row at a time, so that the products hide the loads.
        const int ahead = t + kPrefetchTokens + h / kScoreHeads;
        if (ahead < count) prefetch_row(token[ahead], width);
        score_tile(query + h, token + t, width, scores + t * kHeadBlock + h);
      }
    }
    softmax.round(scores, count, args.softmax_scale);
    const bool is_first = first == start;
    int column = 0;
    for (; column + 2 * kLanes <= rank; column += 2 * kLanes) {
      add_columns<2>(token, count, column, heads, scores, softmax.kept, is_first, sums, rank);
    }
    for (; column < rank; column += kLanes) {
      add_columns<1>(token, count, column, heads, scores, softmax.kept, is_first, sums, rank);
    }
  }
  for (int h = 0; h < heads; ++h) {
    args.split_stats[(slot + h) * 2] = softmax.highest[h];
    args.split_stats[(slot + h) * 2 + 1] = softmax.total[h];
  }
}

int num_splits(const MlaFrontArgs& args, int row) { return args.row_position[row] / args.split_tokens + 1; }

// mla_latent of one head and row from its splits, in their order.
void combine_splits(const MlaFrontArgs& args, int row, int head) {
  const int rank = args.kv_rank, splits = num_splits(args, row);
  const std::int64_t first = std::int64_t{row} * args.max_splits * args.heads + head;
  float highest = -__builtin_inff();
  for (int s = 0; s < splits; ++s) {
    const float top = args.split_stats[(first + std::int64_t{s} * args.heads) * 2];
    highest = top > highest ? top : highest;
  }
  float total = 0.0f;
  alignas(64) float latent[kMaxMlaWidth];
  for (int i = 0; i < rank; ++i) latent[i] = 0.0f;
  for (int s = 0; s < splits; ++s) {
    const std::int64_t slot = first + std::int64_t{s} * args.heads;
    const float weight = exp(args.split_stats[slot * 2] - highest);
    total = mul_add(weight, args.split_stats[slot * 2 + 1], total);
    const float* const sums = args.split_sums + slot * rank;
    for (int i = 0; i < rank; ++i) latent[i] = mul_add(weight, sums[i], latent[i]);
  }
  bf16* const out = args.mla_latent + (std::int64_t{row} * args.heads + head) * rank;
  for (int i = 0; i < rank; ++i) out[i] = round_bf16(latent[i] / total);
}

// attn_out of one head, all rows: combined latents, W_UV, gate; rounded once.
void value_head(const MlaFrontArgs& args, int head) {
  const Shape shape(args);
  const int rows = args.mix.rows;
  for (int r = 0; r < rows; ++r) combine_splits(args, r, head);
  const Rows latents(args.mla_latent + std::int64_t{head} * args.kv_rank, rows, std::int64_t{args.heads} * args.kv_rank);
  const std::int64_t gate_column = shape.query_width + shape.cache_width;
  float sums[kMaxRows * kTileRows];
  for (int start = 0; start < args.v_dim; start += kTileRows) {
    const std::int64_t channel = std::int64_t{head} * args.v_dim + start;
    tile_dot(args.w_uv, channel / kTileRows, rows, latents.at, sums);
    for (int r = 0; r < rows; ++r) {
      const bf16* const gate = args.mla_proj + r * args.in_proj.rows + gate_column + channel;
      bf16* const out = args.attn_out + std::int64_t{r} * args.heads * args.v_dim + channel;
      for (int i = 0; i < kTileRows; ++i) {
        const float factor = args.has_gate ? sigmoid(widen(gate[i])) : 1.0f;
        out[i] = round_bf16(sums[r * kTileRows + i] * factor);
      }
    }
  }
}

// Splits of the longest context of the step.
int most_splits(const MlaFrontArgs& args) {
  int most = 1;
  for (int r = 0; r < args.mix.rows; ++r) most = num_splits(args, r) > most ? num_splits(args, r) : most;
  return most;
}

// Heads of one unit: all that may share a pass over the cache, but fewer if threads would be idle. A head's result does not
// depend on it.
int heads_per_unit(const MlaFrontArgs& args, int splits, int threads) {
  int block = kHeadBlock;
  const auto units = [&] { return std::int64_t{args.mix.rows} * splits * ((args.heads + block - 1) / block); };
  while (threads > 1 && block > kScoreHeads && units() < 2 * threads) block /= 2;
  return block;
}

}  // namespace

void mla_front(const MlaFrontArgs& args, Worker& worker) {
  const int rows = args.mix.rows;
  mix_norm(args.mix, worker);

  const Rows in(args.mix.norm_out, rows, args.in_proj.cols);
  linear_tiles(args.in_proj, rows, in.at, args.mla_proj, worker);
  worker.barrier();

  worker.split(rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      norm_query(args, static_cast<int>(row));
      insert_row(args, static_cast<int>(row));
    }
  });
  worker.barrier();

  worker.split(args.heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t head = first; head < last; ++head) query_head(args, static_cast<int>(head));
  });
  worker.barrier();

  // Blocks of heads innermost: they read the same rows at about the same time.
  const int splits = most_splits(args);
  const int block = heads_per_unit(args, splits, worker.count());
  const int blocks = (args.heads + block - 1) / block;
  worker.split(std::int64_t{rows} * splits * blocks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t unit = first; unit < last; ++unit) {
      const int head = static_cast<int>(unit % blocks) * block;
      const int split = static_cast<int>(unit / blocks % splits);
      const int row = static_cast<int>(unit / blocks / splits);
      if (split >= num_splits(args, row)) continue;
      attend_split(args, row, split, head, args.heads - head < block ? args.heads - head : block);
    }
  });
  worker.barrier();

  worker.split(args.heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t head = first; head < last; ++head) value_head(args, static_cast<int>(head));
  });
}

}  // namespace kdecode::KD_NS
