// Attention over pieces of a context (splits of the rows that are here, rows of other ranks) added up to one.
#pragma once

#include "../common/vmath.h"
#include "rows.h"

namespace kdecode::KD_NS {
namespace {

// What is known of some of a context for one head and row: stats are the largest score and the sum of exponentials.
struct Piece {
  const float* stats;  // [2]
  const float* sums;   // [kv_rank], weighted
};

// Pieces at(0) .. at(count - 1) as one, in their order; nothing of none.
template <class At>
void add_pieces(int count, int rank, At&& at, float* stats, float* __restrict sums) {
  float highest = -__builtin_inff(), total = 0.0f;
  for (int p = 0; p < count; ++p) {
    const float top = at(p).stats[0];
    highest = top > highest ? top : highest;
  }
  for (int i = 0; i < rank; ++i) sums[i] = 0.0f;
  for (int p = 0; p < count; ++p) {
    const Piece piece = at(p);
    const float weight = exp(piece.stats[0] - highest);
    total = mul_add(weight, piece.stats[1], total);
    for (int i = 0; i < rank; ++i) sums[i] = mul_add(weight, piece.sums[i], sums[i]);
  }
  stats[0] = highest;
  stats[1] = total;
}

// What is here for one head, of any rank, and one row.
inline void add_splits(const MlaFrontArgs& args, int row, int head, float* stats, float* sums) {
  const int heads = Shape(args).all_heads;
  const std::int64_t first = std::int64_t{row} * args.max_splits * heads + head;
  add_pieces(num_splits(args, row), args.kv_rank, [&](int split) {
    const std::int64_t slot = first + std::int64_t{split} * heads;
    return Piece{args.split_stats + slot * 2, args.split_sums + slot * args.kv_rank};
  }, stats, sums);
}

// What each rank has of all heads, as it gives it to the others: sums [rows, heads, kv_rank], then stats [rows, heads, 2].
struct Given {
  explicit Given(const MlaFrontArgs& args) : args(args), heads(Shape(args).all_heads) {}

  std::int64_t slot(int row, int head) const { return std::int64_t{row} * heads + head; }
  std::int64_t stats_at() const { return behind(slot(args.mix.rows, 0) * args.kv_rank * sizeof(float)); }
  Piece of(const Parts& parts, int rank, int row, int head) const {
    return {parts.of<float>(rank, stats_at()) + slot(row, head) * 2, parts.of<float>(rank) + slot(row, head) * args.kv_rank};
  }
  void give(const Parts& parts, int row, int head) const {
    add_splits(args, row, head, parts.mine<float>(stats_at()) + slot(row, head) * 2,
               parts.mine<float>() + slot(row, head) * args.kv_rank);
  }

  const MlaFrontArgs& args;
  const int heads;
};

// mla_latent of one head of this rank and a row. parts: of `Given`, of all ranks; null: all of the context is here.
inline void finish_latent(const MlaFrontArgs& args, const Parts* parts, int row, int head) {
  const int rank = args.kv_rank;
  float stats[2];
  alignas(64) float latent[kMaxMlaWidth];
  if (parts == nullptr) {
    add_splits(args, row, head, stats, latent);
  } else {
    const Given given(args);
    const int among_all = parts->rank() * args.heads + head;
    add_pieces(parts->size(), rank, [&](int r) { return given.of(*parts, r, row, among_all); }, stats, latent);
  }
  bf16* const out = args.mla_latent + (std::int64_t{row} * args.heads + head) * rank;
  for (int i = 0; i < rank; ++i) out[i] = round_bf16(latent[i] / stats[1]);
}

}  // namespace
}  // namespace kdecode::KD_NS
