#include "cpu.h"

#include <cstring>

#include "../common/threads.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kBlock = 16;  // experts whose best is remembered, so that each selection looks at E / 16 + 16 keys

// Larger is chosen first: the fp32 order of the score (NaN below everything), then the lower expert.
std::uint64_t selection_key(float score, int expert) {
  const std::uint32_t bits = float_bits(score == 0.0f ? 0.0f : score);  // -0 and 0 tie
  const std::uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  const std::uint32_t rank = score == score ? ordered : 0;
  return static_cast<std::uint64_t>(rank) << 32 | static_cast<std::uint32_t>(~expert);
}

std::uint64_t best_of_block(const std::uint64_t* keys, int block, int experts) {
  const int last = (block + 1) * kBlock < experts ? (block + 1) * kBlock : experts;
  std::uint64_t best = 0;
  for (int e = block * kBlock; e < last; ++e) best = keys[e] > best ? keys[e] : best;
  return best;
}

int num_experts(const MoeFrontArgs& args) {
  const int ranks = args.exchange == nullptr ? 1 : args.exchange->size();
  return static_cast<int>(args.router.rows) * ranks;
}

// Sigmoid scores of one row -> its experts and their weights, which come from the scores without the bias.
void route_row(const MoeFrontArgs& args, std::int64_t row) {
  const int experts = num_experts(args);
  const float* logits = args.router_logits + row * experts;
  float scores[kMaxExperts];
  std::uint64_t keys[kMaxExperts];
  std::uint64_t best[kMaxExperts / kBlock];
  for (int e = 0; e < experts; ++e) scores[e] = sigmoid(logits[e]);
  for (int e = 0; e < experts; ++e) keys[e] = selection_key(scores[e] + args.router_bias[e], e);
  const int blocks = (experts + kBlock - 1) / kBlock;
  for (int b = 0; b < blocks; ++b) best[b] = best_of_block(keys, b, experts);

  std::int32_t* ids = args.route_ids + row * args.top_k;
  float* weights = args.route_weights + row * args.top_k;
  float sum = 0.0f;
  for (int slot = 0; slot < args.top_k; ++slot) {
    int block = 0;
    for (int b = 1; b < blocks; ++b) block = best[b] > best[block] ? b : block;
    const int expert = static_cast<int>(~static_cast<std::uint32_t>(best[block]));
    ids[slot] = expert;
    weights[slot] = scores[expert];
    sum += scores[expert];
    keys[expert] = 0;  // below every key: a low word of 0 would need expert 2^32 - 1
    best[block] = best_of_block(keys, block, experts);
  }
  for (int slot = 0; slot < args.top_k; ++slot) {
    const float weight = args.is_renormalized ? weights[slot] / (sum + 1e-20f) : weights[slot];
    weights[slot] = weight * args.routed_scaling;
  }
}

// The activated product of the shared experts.
void shared_gate_up(const MoeFrontArgs& args, Rows& in, Worker& worker) {
  const std::int64_t width = args.shared_gate_up.rows / 2;
  if (width == 0) return;
  bf16* product[kMaxRows];
  for (int r = 0; r < args.mix.rows; ++r) product[r] = args.shared_product + r * width;
  worker.split(width / kTileRows, units_per_claim(2 * args.shared_gate_up.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t pair = first; pair < last; ++pair) {
      gated_pair(args.shared_gate_up, pair, in, args.activation, product);
    }
  });
}

// This rank's rows of latent_down and of the router.
void latents_and_logits(const MoeFrontArgs& args, Rows& in, bf16* latent, float* logits, Worker& worker) {
  if (args.latent_down.rows > 0) linear_tiles(args.latent_down, in, latent, worker);
  worker.split(args.router.num_tiles(), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) {
      linear_tile(args.router, tile, in, logits, args.router.rows);
    }
  });
}

// A row of every rank's part side by side.
template <class T>
void gather_row(const Parts& parts, std::int64_t bytes, std::int64_t row, std::int64_t width, T* out) {
  for (int rank = 0; rank < parts.size(); ++rank) {
    std::memcpy(out + (row * parts.size() + rank) * width, parts.of<T>(rank, bytes) + row * width, width * sizeof(T));
  }
}

// Logits and latents are exchanged together, while the shared experts' product is computed; then every rank selects.
void route_of_ranks(const MoeFrontArgs& args, Rows& in, Worker& worker) {
  const int rows = args.mix.rows;
  const std::int64_t latents = behind(rows * args.router.rows * std::int64_t{sizeof(float)});
  Parts parts(*args.exchange, worker);
  latents_and_logits(args, in, parts.mine<bf16>(latents), parts.mine<float>(), worker);
  parts.publish();
  shared_gate_up(args, in, worker);
  parts.wait();
  worker.split(rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      gather_row(parts, 0, row, args.router.rows, args.router_logits);
      if (args.latent_down.rows > 0) gather_row(parts, latents, row, args.latent_down.rows, args.latent);
      route_row(args, row);
    }
  });
}

}  // namespace

void moe_front(const MoeFrontArgs& args, Worker& worker) {
  mix_norm(args.mix, worker);

  Rows in(worker, args.mix.norm_out, args.mix.rows, args.mix.width);
  if (args.exchange != nullptr) return route_of_ranks(args, in, worker);
  // Three products of one input. The largest comes first, so that the last claims are the smallest matrix's.
  shared_gate_up(args, in, worker);
  latents_and_logits(args, in, args.latent, args.router_logits, worker);
  worker.barrier();

  worker.split(args.mix.rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) route_row(args, row);
  });
}

}  // namespace kdecode::KD_NS
