#include "cpu.h"

#include <cstring>

#include "../common/rotate.h"
#include "../common/attention.h"
#include "../common/tile_ops.h"
#include "pieces.h"
#include "rows.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kUnitBlocks = 4;         // blocks of lanes that share one pass over the cache, at most
constexpr int kMinUnitLanes = 8;       // fewer do not fill the registers
constexpr int kUnitsPerThread = 4;     // so that the threads finish together

static_assert(kMaxMlaWidth <= kMaxQueryWidth, "a cache row is a key");

// The rope part of a query or cache row, turned by the row's position where the plan has rotations.
void copy_rope(const MlaFrontArgs& args, int row, const bf16* x, bf16* out) {
  const float* const rotation = args.row_rotation;
  rotate_pairs(x, rotation == nullptr ? nullptr : rotation + std::int64_t{row} * args.rope_dim, args.rope_dim, out);
}

// The row's own cache row, where it is kept here: normed latent, then the rope part.
void insert_row(const MlaFrontArgs& args, int row) {
  const Shape shape(args);
  std::int64_t index = args.row_position[row];
  if (args.exchange != nullptr) {
    const Share share(args);
    if (!share.has(index)) return;
    index = share.index(index);
  }
  const bf16* const latent = args.mla_proj + row * args.in_proj.rows + shape.query_width;
  const std::int64_t at = cache_row(args, row, index) * shape.cache_width;
  bf16 wide[kMaxMlaWidth];
  bf16* const out = args.fp8_values == nullptr ? static_cast<bf16*>(args.pages) + at : wide;
  rms_norm_row(latent, args.kv_norm, args.latent_eps, args.kv_rank, out);
  copy_rope(args, row, latent + args.kv_rank, out + args.kv_rank);
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
void query_head(const MlaFrontArgs& args, int head, Worker& worker) {
  const Shape shape(args);
  const int rows = args.mix.rows;
  bf16 queries[kMaxRows * kMaxMlaHeadDim];
  // Of this head: made here, or columns of the projection.
  const bf16* first_query = args.mla_proj + std::int64_t{head} * shape.qk_dim;
  std::int64_t query_stride = args.in_proj.rows;
  float sums[kMaxRows * kTileRows];
  if (args.q_b.data != nullptr) {
    Rows in(worker, args.query_norm, rows, args.q_b.cols);
    for (int start = 0; start < shape.qk_dim; start += kTileRows) {
      tile_dot(args.q_b, (std::int64_t{head} * shape.qk_dim + start) / kTileRows, in, sums);
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < kTileRows; ++i) queries[r * shape.qk_dim + start + i] = round_bf16(sums[r * kTileRows + i]);
      }
    }
    first_query = queries;
    query_stride = shape.qk_dim;
  }
  Rows query(worker, first_query, rows, query_stride);
  for (int start = 0; start < args.kv_rank; start += kTileRows) {
    tile_dot(args.w_uk, (std::int64_t{head} * args.kv_rank + start) / kTileRows, query, sums);
    for (int r = 0; r < rows; ++r) {
      bf16* const out = args.mla_query + (std::int64_t{r} * args.heads + head) * shape.cache_width + start;
      for (int i = 0; i < kTileRows; ++i) out[i] = round_bf16(sums[r * kTileRows + i]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    bf16* const out = args.mla_query + (std::int64_t{r} * args.heads + head) * shape.cache_width + args.kv_rank;
    copy_rope(args, r, first_query + r * query_stride + args.nope_dim, out);
  }
}

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

// The queries of all heads, [rows, heads, kv_rank + rope_dim] on the rank that has them.
class Queries {
 public:
  // parts: where the ranks have given each other theirs; null: all heads are this rank's.
  Queries(const MlaFrontArgs& args, const Parts* parts) : args_(args), parts_(parts) {}

  const bf16* at(int row, int head) const {
    const bf16* const queries = parts_ == nullptr ? args_.mla_query : parts_->of<bf16>(head / args_.heads);
    return queries + (std::int64_t{row} * args_.heads + head % args_.heads) * Shape(args_).cache_width;
  }

 private:
  const MlaFrontArgs& args_;
  const Parts* parts_;
};

// Gives the other ranks a head's queries.
void give_queries(const MlaFrontArgs& args, int head, bf16* out) {
  const std::int64_t width = Shape(args).cache_width;
  for (int r = 0; r < args.mix.rows; ++r) {
    const std::int64_t at = (std::int64_t{r} * args.heads + head) * width;
    std::memcpy(out + at, args.mla_query + at, width * sizeof(bf16));
  }
}

// Rows [first, last) of one request: the last one's pages hold the context of all, in cache rows up to `length`.
struct Group {
  int first, last;
  std::int64_t length;
};

// attn_out of one head, all rows: finished latents, W_UV, gate; rounded once.
void value_head(const MlaFrontArgs& args, const Parts* parts, int head, Worker& worker) {
  const Shape shape(args);
  const int rows = args.mix.rows;
  for (int r = 0; r < rows; ++r) finish_latent(args, parts, r, head);
  Rows latents(worker, args.mla_latent + std::int64_t{head} * args.kv_rank, rows, std::int64_t{args.heads} * args.kv_rank);
  const std::int64_t gate_column = shape.query_width + shape.cache_width;
  float sums[kMaxRows * kTileRows];
  for (int start = 0; start < args.v_dim; start += kTileRows) {
    const std::int64_t channel = std::int64_t{head} * args.v_dim + start;
    tile_dot(args.w_uv, channel / kTileRows, latents, sums);
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

// Puts rows that follow each other together while each one's context begins with the one's before; returns the number of groups.
int group_rows(const MlaFrontArgs& args, Group* groups) {
  int count = 0;
  for (int row = 0; row < args.mix.rows; ++row) {
    const std::int32_t* const pages = args.row_pages + std::int64_t{row} * args.max_pages;
    const std::int64_t length = seen_rows(args, row);
    if (row > 0 && length >= groups[count - 1].length) {
      const std::int64_t shared = (groups[count - 1].length - 1) / args.page_rows + 1;
      if (std::memcmp(pages - args.max_pages, pages, shared * sizeof(*pages)) == 0) {
        groups[count - 1].last = row + 1;
        groups[count - 1].length = length;
        continue;
      }
    }
    groups[count++] = {row, row + 1, length};
  }
  return count;
}

// How the attention of a step is cut: a unit is a split of a group's context for some of its lanes, and all splits of the same
// lanes follow each other. A lane is a head of a row, rows outermost.
struct Units {
  Units(const MlaFrontArgs& args, int threads) : num_groups(group_rows(args, groups)) {
    // Fewer lanes if threads would be idle; no result depends on it.
    while (count(args) < kUnitsPerThread * threads && threads > 1 && lanes > kMinUnitLanes) lanes /= 2;
  }

  int splits(const MlaFrontArgs& args, const Group& group) const { return num_splits(args, group.last - 1); }
  int pieces(const MlaFrontArgs& args, const Group& group) const {
    return ((group.last - group.first) * Shape(args).all_heads + lanes - 1) / lanes;
  }
  std::int64_t count(const MlaFrontArgs& args) const {
    std::int64_t total = 0;
    for (int g = 0; g < num_groups; ++g) total += std::int64_t{splits(args, groups[g])} * pieces(args, groups[g]);
    return total;
  }

  Group groups[kMaxRows];
  int num_groups;
  int lanes = kUnitBlocks * kLaneBlock;
};

// Some lanes of one group, and the buffers of whoever attends to them.
class Attention {
 public:
  Attention(const MlaFrontArgs& args, const Queries& queries) : args_(args), shape_(args), of_heads_(queries) {}

  void set(const Group& group, int first_lane, int lanes) {
    if (first_lane_ == first_lane && group_.first == group.first && group_.last == group.last) return;
    group_ = group, first_lane_ = first_lane, lanes_ = lanes;
    for (int b = 0; b * kLaneBlock < lanes; ++b) {
      const bf16* query[kLaneBlock];
      for (int i = 0; i < block_lanes(b); ++i) query[i] = of_heads_.at(row_of(b, i), head_of(b, i));
      queries_[b].set(query, block_lanes(b), shape_.cache_width);
    }
  }

  // Largest scores, sums of exponentials and weighted sums of one split. A row that ends before the split gets nothing useful.
  void run(int split) {
    const std::int64_t start = std::int64_t{split} * args_.split_tokens;
    const std::int64_t end = start + args_.split_tokens < group_.length ? start + args_.split_tokens : group_.length;
    Softmax softmax[kUnitBlocks];
    for (std::int64_t first = start; first < end; first += kTokenBlock) {
      const int count = static_cast<int>(end - first < kTokenBlock ? end - first : kTokenBlock);
      gather(first, count);
      look_ahead(first + kTokenBlock);
      for (int b = 0; b * kLaneBlock < lanes_; ++b) round(split, b, first, count, first == start, softmax[b]);
    }
    for (int b = 0; b * kLaneBlock < lanes_; ++b) {
      for (int i = 0; i < block_lanes(b); ++i) {
        float* const stats = args_.split_stats + slot(b, i, split) * 2;
        stats[0] = softmax[b].highest[i];
        stats[1] = softmax[b].total[i];
      }
    }
  }

 private:
  int block_lanes(int block) const {
    const int left = lanes_ - block * kLaneBlock;
    return left < kLaneBlock ? left : kLaneBlock;
  }
  int row_of(int block, int i) const { return group_.first + (first_lane_ + block * kLaneBlock + i) / shape_.all_heads; }
  int head_of(int block, int i) const { return (first_lane_ + block * kLaneBlock + i) % shape_.all_heads; }
  // Of a buffer [rows, max_splits, heads].
  std::int64_t slot(int block, int i, int split) const {
    return (std::int64_t{row_of(block, i)} * args_.max_splits + split) * shape_.all_heads + head_of(block, i);
  }

  // Addresses of `count` cache rows as bf16; those of an fp8 cache are dequantised. The list is filled up with the last row, so
  // that nothing beyond the context is touched.
  void gather(std::int64_t first, int count) {
    const int width = shape_.cache_width;
    for (int t = 0; t < count; ++t) {
      const std::int64_t at = cache_row(args_, group_.last - 1, first + t) * width;
      if (args_.fp8_values == nullptr) {
        token_[t] = static_cast<const bf16*>(args_.pages) + at;
        continue;
      }
      dequantise(static_cast<const fp8*>(args_.pages) + at, args_.fp8_values, width, wide_ + t * width);
      token_[t] = wide_ + t * width;
    }
    for (int t = count; t % kScoreTokens != 0; ++t) token_[t] = token_[count - 1];
  }

  // The rows from `first` on are the next to be read, in this split or the one after it.
  void look_ahead(std::int64_t first) {
    const std::int64_t left = group_.length - first;
    ahead_.bytes = shape_.cache_width * (args_.fp8_values == nullptr ? sizeof(bf16) : sizeof(fp8));
    ahead_.count = static_cast<int>(left < 0 ? 0 : left < kTokenBlock ? left : kTokenBlock);
    ahead_.done = 0;
    for (int t = 0; t < ahead_.count; ++t) {
      ahead_.row[t] = static_cast<const char*>(args_.pages) + cache_row(args_, group_.last - 1, first + t) * ahead_.bytes;
    }
  }

  // Scores of a block of lanes with `count` tokens from `first` on; tokens behind a lane's row get no weight.
  void score(int block, std::int64_t first, int count) {
    queries_[block].scores(token_, (count + kScoreTokens - 1) / kScoreTokens * kScoreTokens, scores_);
    for (int i = 0; i < block_lanes(block); ++i) {
      const std::int64_t seen = seen_rows(args_, row_of(block, i)) - first;
      for (std::int64_t t = seen > 0 ? seen : 0; t < count; ++t) scores_[t * kLaneBlock + i] = -__builtin_inff();
    }
  }

  void round(int split, int block, std::int64_t first, int count, bool is_first, Softmax& softmax) {
    score(block, first, count);
    softmax.round(scores_, count, args_.softmax_scale);
    float* sums[kLaneBlock];
    for (int i = 0; i < block_lanes(block); ++i) sums[i] = args_.split_sums + slot(block, i, split) * args_.kv_rank;
    add_round({token_, count, scores_, softmax.kept, sums, is_first}, block_lanes(block), args_.kv_rank, ahead_);
  }

  const MlaFrontArgs& args_;
  const Shape shape_;
  const Queries of_heads_;
  Group group_{-1, -1, 0};
  int first_lane_ = 0, lanes_ = 0;
  const bf16* token_[kTokenBlock];
  Ahead ahead_;
  alignas(64) float scores_[kTokenBlock * kLaneBlock] = {};
  alignas(64) bf16 wide_[kTokenBlock * kMaxMlaWidth];
  QueryBlock queries_[kUnitBlocks];
};

// Attention of all lanes of the step to the rows that are here, by splits; add_splits adds them up.
void attend(const MlaFrontArgs& args, const Queries& queries, Worker& worker) {
  const Units units(args, worker.count());
  const std::int64_t count = units.count(args), claim = count / (kUnitsPerThread * worker.count());
  Attention attention(args, queries);
  worker.split(count, claim > 1 ? claim : 1, [&](std::int64_t first, std::int64_t last) {
    std::int64_t begin = 0;
    for (int g = 0; g < units.num_groups && begin < last; ++g) {
      const Group& group = units.groups[g];
      const int splits = units.splits(args, group), lanes = (group.last - group.first) * Shape(args).all_heads;
      const std::int64_t end = begin + std::int64_t{splits} * units.pieces(args, group);
      for (std::int64_t unit = first > begin ? first : begin; unit < last && unit < end; ++unit) {
        const int lane = static_cast<int>((unit - begin) / splits) * units.lanes;
        attention.set(group, lane, lanes - lane < units.lanes ? lanes - lane : units.lanes);
        attention.run(static_cast<int>((unit - begin) % splits));
      }
      begin = end;
    }
  });
}

// The attention of ranks that have some of the context each: queries go to where the rows are, and what is found there comes
// back. Every rank adds up what it gets in the order of the ranks.
void attend_of_ranks(const MlaFrontArgs& args, Worker& worker) {
  Parts queries(*args.exchange, worker);
  worker.split(args.heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t head = first; head < last; ++head) {
      query_head(args, static_cast<int>(head), worker);
      give_queries(args, static_cast<int>(head), queries.mine<bf16>());
    }
  });
  queries.complete();
  attend(args, Queries(args, &queries), worker);
  worker.barrier();

  const Given given(args);
  Parts parts(*args.exchange, worker);
  worker.split(given.slot(args.mix.rows, 0), args.heads, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      given.give(parts, static_cast<int>(i / given.heads), static_cast<int>(i % given.heads));
    }
  });
  parts.complete();
  worker.split(args.heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t head = first; head < last; ++head) value_head(args, &parts, static_cast<int>(head), worker);
  });
}

}  // namespace

void mla_front(const MlaFrontArgs& args, Worker& worker) {
  const int rows = args.mix.rows;
  mix_norm(args.mix, worker);

  Rows in(worker, args.mix.norm_out, rows, args.in_proj.cols);
  linear_tiles(args.in_proj, in, args.mla_proj, worker);
  worker.barrier();

  worker.split(rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      norm_query(args, static_cast<int>(row));
      insert_row(args, static_cast<int>(row));
    }
  });
  worker.barrier();
  if (args.exchange != nullptr) return attend_of_ranks(args, worker);

  worker.split(args.heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t head = first; head < last; ++head) query_head(args, static_cast<int>(head), worker);
  });
  worker.barrier();

  attend(args, Queries(args, nullptr), worker);
  worker.barrier();

  worker.split(args.heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t head = first; head < last; ++head) value_head(args, nullptr, static_cast<int>(head), worker);
  });
}

}  // namespace kdecode::KD_NS
