// Sizes of an MLA layer's step, and which cache rows a row of it has on this rank.
#pragma once

#include "cpu.h"

namespace kdecode::KD_NS {
namespace {

struct Shape {
  explicit Shape(const MlaFrontArgs& args)
      : cache_width(args.kv_rank + args.rope_dim),
        qk_dim(args.nope_dim + args.rope_dim),
        query_width(args.q_b.data != nullptr ? args.q_b.cols : std::int64_t{args.heads} * qk_dim),
        all_heads(args.exchange == nullptr ? args.heads : args.heads * args.exchange->size()) {}
  int cache_width, qk_dim;
  std::int64_t query_width;  // columns of the query in mla_proj; the latent comes next
  int all_heads;             // whose queries attend to the rows that are here
};

// Of several ranks: whether the cache row of a position is here; which one it is among those of its request on its rank; how
// many of the first positions are here.
struct Share {
  explicit Share(const MlaFrontArgs& args)
      : interleave(args.interleave), rank(args.exchange->rank()), turn(std::int64_t{args.interleave} * args.exchange->size()) {}

  bool has(std::int64_t position) const { return position % turn / interleave == rank; }
  std::int64_t index(std::int64_t position) const { return position / turn * interleave + position % interleave; }
  std::int64_t length(std::int64_t positions) const {
    const std::int64_t rest = positions % turn - rank * interleave;
    return positions / turn * interleave + (rest < 0 ? 0 : rest < interleave ? rest : interleave);
  }

  std::int64_t interleave, rank, turn;
};

// Where the `index`-th cache row is that this rank has of a row's request.
inline std::int64_t cache_row(const MlaFrontArgs& args, int row, std::int64_t index) {
  const std::int64_t page = args.row_pages[std::int64_t{row} * args.max_pages + index / args.page_rows];
  return page * args.page_rows + index % args.page_rows;
}

// Cache rows that a row sees here.
inline std::int64_t seen_rows(const MlaFrontArgs& args, int row) {
  if (args.row_context != nullptr) return args.row_context[row];
  const std::int64_t positions = std::int64_t{args.row_position[row]} + 1;
  return args.exchange == nullptr ? positions : Share(args).length(positions);
}

// Splits that a row needs; none of a context of which nothing is here.
inline int num_splits(const MlaFrontArgs& args, int row) {
  const std::int64_t seen = seen_rows(args, row);
  return seen == 0 ? 0 : static_cast<int>((seen - 1) / args.split_tokens + 1);
}

}  // namespace
}  // namespace kdecode::KD_NS
