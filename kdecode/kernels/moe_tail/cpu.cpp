#include "cpu.h"

#include <cstring>

#include "../common/residual.h"
#include "../common/threads.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kMaxPairs = kMaxRows * kMaxTopK;

// The (row, slot) pairs of a step by expert, in the order of first use: an expert's weights are read once for all its rows.
// A group has at most kMaxRows members whatever the ids are; an id outside [0, E) is in no group.
struct Groups {
  const std::int16_t* pairs(int group) const { return pair + first[group]; }

  int count = 0;
  std::int32_t expert[kMaxPairs];
  std::int16_t size[kMaxPairs];
  std::int16_t first[kMaxPairs];  // of the group's members in `pair`
  std::int16_t pair[kMaxPairs];
};

bool is_expert(const MoeTailArgs& args, std::int32_t id) {
  return id >= 0 && id < static_cast<std::int32_t>(args.expert_down->at.size());
}

// Every thread builds the same list: cheaper than a barrier after one thread has.
void build_groups(const MoeTailArgs& args, Groups& groups) {
  std::int16_t latest[kMaxExperts];  // group of an expert, plus one; 0: none yet
  std::int16_t group_of[kMaxPairs];
  const int experts = static_cast<int>(args.expert_down->at.size());
  for (int e = 0; e < experts; ++e) latest[e] = 0;
  const int pairs = args.rows * args.top_k;
  for (int pair = 0; pair < pairs; ++pair) {
    const std::int32_t id = args.route_ids[pair];
    group_of[pair] = -1;
    if (!is_expert(args, id)) continue;
    if (latest[id] == 0 || groups.size[latest[id] - 1] == kMaxRows) {
      groups.expert[groups.count] = id;
      groups.size[groups.count] = 0;
      latest[id] = static_cast<std::int16_t>(++groups.count);
    }
    group_of[pair] = static_cast<std::int16_t>(latest[id] - 1);
    ++groups.size[group_of[pair]];
  }
  std::int16_t next[kMaxPairs];
  int first = 0;
  for (int group = 0; group < groups.count; ++group) {
    next[group] = groups.first[group] = static_cast<std::int16_t>(first);
    first += groups.size[group];
  }
  for (int pair = 0; pair < pairs; ++pair) {
    if (group_of[pair] >= 0) groups.pair[next[group_of[pair]]++] = static_cast<std::int16_t>(pair);
  }
}

// Work items [first, last) of `per_group` units each group -> body(group, first unit, last unit).
template <class Body>
void for_groups(std::int64_t first, std::int64_t last, std::int64_t per_group, Body&& body) {
  while (first < last) {
    const std::int64_t group = first / per_group;
    const std::int64_t end = (group + 1) * per_group < last ? (group + 1) * per_group : last;
    body(static_cast<int>(group), first - group * per_group, end - group * per_group);
    first = end;
  }
}

void experts_gate_up(const MoeTailArgs& args, const Groups& groups, Worker& worker) {
  const Tiles* weights = args.expert_gate_up->at.data();
  const std::int64_t inner = weights[0].rows / 2;
  const std::int64_t per_group = inner / kTileRows;
  const std::int64_t claim = units_per_claim(2 * weights[0].tile_bytes());
  Rows in(worker);
  int present = -1;  // the group whose rows `in` has
  worker.split(groups.count * per_group, claim, [&](std::int64_t first, std::int64_t last) {
    for_groups(first, last, per_group, [&](int group, std::int64_t begin, std::int64_t end) {
      const Tiles& w = weights[groups.expert[group]];
      const std::int16_t* const pairs = groups.pairs(group);
      bf16* out[kMaxRows];
      for (int i = 0; i < groups.size[group]; ++i) out[i] = args.expert_product + pairs[i] * inner;
      if (group != present) {
        in.set(groups.size[group], [&](int i) { return args.expert_in + pairs[i] / args.top_k * w.cols; });
        present = group;
      }
      for (std::int64_t unit = begin; unit < end; ++unit) gated_pair(w, unit, in, args.activation, out);
    });
  });
}

// out = down of the shared experts' product, rounded if Out is bf16.
template <class Out>
void shared_down(const MoeTailArgs& args, Out* out, Worker& worker) {
  const Tiles& w = args.shared_down;
  if (w.rows == 0) return;
  Rows in(worker, args.shared_product, args.rows, w.cols);
  linear_tiles(w, in, out, worker);
}

// out[pair] = down of the pair's product, rounded if Out is bf16.
template <class Out>
void experts_down(const MoeTailArgs& args, const Groups& groups, Out* outputs, Worker& worker) {
  const Tiles* weights = args.expert_down->at.data();
  const std::int64_t per_group = weights[0].num_tiles();
  const std::int64_t claim = units_per_claim(weights[0].tile_bytes());
  Rows in(worker);
  int present = -1;  // the group whose rows `in` has
  worker.split(groups.count * per_group, claim, [&](std::int64_t first, std::int64_t last) {
    for_groups(first, last, per_group, [&](int group, std::int64_t begin, std::int64_t end) {
      const Tiles& w = weights[groups.expert[group]];
      const std::int16_t* const pairs = groups.pairs(group);
      if (group != present) {
        in.set(groups.size[group], [&](int i) { return args.expert_product + pairs[i] * w.cols; });
        present = group;
      }
      for (std::int64_t tile = begin; tile < end; ++tile) {
        float sums[kMaxRows * kTileRows];
        tile_dot(w, tile, in, sums);
        const int columns = tile_width(w, tile);
        for (int i = 0; i < in.count(); ++i) {
          Out* out = outputs + pairs[i] * w.rows + tile * kTileRows;
          for (int c = 0; c < columns; ++c) put(sums[i * kTileRows + c], out + c);
        }
      }
    });
  });
}

inline float number(bf16 value) { return widen(value); }
inline float number(float value) { return value; }

// sums = the weighted outputs of one row's experts, `columns` columns from `start`, in the order of the route's slots.
template <class Out>
void sum_experts(const MoeTailArgs& args, const Out* outputs, std::int64_t row, std::int64_t start, int columns,
                 std::int64_t in_width, float* sums) {
  for (int c = 0; c < columns; ++c) sums[c] = 0.0f;
  for (int slot = 0; slot < args.top_k; ++slot) {
    const std::int64_t pair = row * args.top_k + slot;
    if (!is_expert(args, args.route_ids[pair])) {
      for (int c = 0; c < columns; ++c) sums[c] = __builtin_nanf("");
      continue;
    }
    const float weight = args.route_weights[pair];
    const Out* out = outputs + pair * in_width + start;
    for (int c = 0; c < columns; ++c) sums[c] = mul_add(weight, number(out[c]), sums[c]);
  }
}

// mlp_delta = bf16(routed + shared), prefix = bf16(prefix + mlp_delta), of `count` numbers from `at`.
void add_delta(const MoeTailArgs& args, const bf16* routed, std::int64_t at, int count) {
  for (int i = 0; i < count; ++i) {
    const float shared = args.shared_down.rows > 0 ? widen(args.shared[at + i]) : 0.0f;
    args.mlp_delta[at + i] = round_bf16(widen(routed[at + i]) + shared);
  }
  add_residual(args.mlp_delta + at, count, args.prefix + at);
}

// The input of latent_up, which any thread may read: expert_sum, normed where the model does.
const bf16* norm_sums(const MoeTailArgs& args, Worker& worker) {
  if (args.latent_norm == nullptr) return args.expert_sum;
  const std::int64_t width = args.latent_up.cols;
  worker.split(args.rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      rms_norm_row(args.expert_sum + row * width, args.latent_norm, args.eps, width, args.normed + row * width);
    }
  });
  worker.barrier();
  return args.normed;
}

void latent_up(const MoeTailArgs& args, Worker& worker) {
  const Tiles& w = args.latent_up;
  Rows in(worker, norm_sums(args, worker), args.rows, w.cols);
  worker.split(w.num_tiles(), units_per_claim(w.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) {
      linear_tile(w, tile, in, args.routed, args.width);
      for (int r = 0; r < args.rows; ++r) {
        add_delta(args, args.routed, r * args.width + tile * kTileRows, tile_width(w, tile));
      }
    }
  });
}

// `in` is the input of all ranks; each has its own rows of the matrix.
void latent_up_of_ranks(const MoeTailArgs& args, Rows& in, Worker& worker) {
  const std::int64_t own = args.latent_up.rows;
  Parts parts(*args.exchange, worker);
  linear_tiles(args.latent_up, in, parts.mine<bf16>(), worker);
  parts.complete();
  split_parts(worker, args.rows, parts.size(), own, [&](std::int64_t row, int rank, std::int64_t start, int columns) {
    const std::int64_t at = row * args.width + rank * own + start;
    std::memcpy(args.routed + at, parts.of<bf16>(rank) + row * own + start, columns * sizeof(bf16));
    add_delta(args, args.routed, at, columns);
  });
}

// From the activated products of the experts on. Each rank has a part of every expert's width and of the shared experts', so that
// both sums are exchanged: unrounded, also an expert's own output, which no rank has whole.
void sums_of_ranks(const MoeTailArgs& args, const Groups& groups, Worker& worker) {
  const std::int64_t in_width = args.expert_down->at.data()[0].rows, rows = args.rows;
  const std::int64_t shared = behind(rows * in_width * std::int64_t{sizeof(float)});
  const bool is_latent = args.latent_up.rows > 0, has_shared = args.shared_down.rows > 0;
  Parts parts(*args.exchange, worker);
  shared_down(args, parts.mine<float>(shared), worker);
  worker.barrier();

  experts_down(args, groups, args.expert_part, worker);
  worker.barrier();

  split_columns(worker, rows, in_width, [&](std::int64_t row, std::int64_t start, int columns) {
    sum_experts(args, args.expert_part, row, start, columns, in_width, parts.mine<float>() + row * in_width + start);
  });
  parts.complete();

  split_columns(worker, rows, in_width, [&](std::int64_t row, std::int64_t start, int columns) {
    const std::int64_t at = row * in_width + start;
    sum_parts(parts, 0, at, columns, args.expert_sum + at);
  });
  if (has_shared) {
    split_columns(worker, rows, args.width, [&](std::int64_t row, std::int64_t start, int columns) {
      const std::int64_t at = row * args.width + start;
      sum_parts(parts, shared, at, columns, args.shared + at);
    });
  }
  worker.barrier();

  if (is_latent) {
    Rows in(worker, norm_sums(args, worker), args.rows, in_width);
    return latent_up_of_ranks(args, in, worker);
  }
  split_columns(worker, rows, in_width, [&](std::int64_t row, std::int64_t start, int columns) {
    add_delta(args, args.expert_sum, row * in_width + start, columns);
  });
}

}  // namespace

void moe_tail(const MoeTailArgs& args, Worker& worker) {
  Groups groups;
  build_groups(args, groups);
  experts_gate_up(args, groups, worker);
  if (args.exchange != nullptr) return sums_of_ranks(args, groups, worker);
  // Independent of the experts: whoever finds no more of their work takes this.
  shared_down(args, args.shared, worker);
  worker.barrier();

  experts_down(args, groups, args.expert_out, worker);
  worker.barrier();

  const std::int64_t in_width = args.expert_down->at.data()[0].rows;
  const bool is_latent = args.latent_up.rows > 0;
  split_columns(worker, args.rows, in_width, [&](std::int64_t row, std::int64_t start, int columns) {
    const std::int64_t at = row * in_width + start;
    float sums[kClaimColumns];
    sum_experts(args, args.expert_out, row, start, columns, in_width, sums);
    for (int c = 0; c < columns; ++c) args.expert_sum[at + c] = round_bf16(sums[c]);
    if (!is_latent) add_delta(args, args.expert_sum, at, columns);
  });
  if (!is_latent) return;
  worker.barrier();
  latent_up(args, worker);
}

}  // namespace kdecode::KD_NS
