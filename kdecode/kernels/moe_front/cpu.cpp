#include "cpu.h"

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

// Sigmoid scores of one row -> its experts and their weights, which come from the scores without the bias.
void route_row(const MoeFrontArgs& args, std::int64_t row) {
  const int experts = static_cast<int>(args.router.rows);
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

void router_tile(const MoeFrontArgs& args, std::int64_t tile, const bf16* const* in) {
  float sums[kMaxRows * kTileRows];
  tile_dot(args.router, tile, args.mix.rows, in, sums);
  const int columns = tile_width(args.router, tile);
  for (int r = 0; r < args.mix.rows; ++r) {
    float* out = args.router_logits + r * args.router.rows + tile * kTileRows;
    for (int i = 0; i < columns; ++i) out[i] = sums[r * kTileRows + i];
  }
}

}  // namespace

void moe_front(const MoeFrontArgs& args, Worker& worker) {
  const int rows = args.mix.rows;
  const std::int64_t width = args.mix.width;
  const std::int64_t shared_width = args.shared_gate_up.rows / 2;

  mix_norm(args.mix, worker);

  // Three products of one input. The largest comes first, so that the last claims are the smallest matrix's.
  const Rows in(args.mix.norm_out, rows, width);
  bf16* product[kMaxRows];
  for (int r = 0; r < rows; ++r) product[r] = args.shared_product + r * shared_width;
  if (shared_width > 0) {
    const std::int64_t bytes = 2 * args.shared_gate_up.tile_bytes();
    worker.split(shared_width / kTileRows, units_per_claim(bytes), [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t pair = first; pair < last; ++pair) {
        gated_pair(args.shared_gate_up, pair, rows, in.at, args.activation, product);
      }
    });
  }
  if (args.latent_down.rows > 0) linear_tiles(args.latent_down, rows, in.at, args.latent, worker);
  worker.split(args.router.num_tiles(), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) router_tile(args, tile, in.at);
  });
  worker.barrier();

  worker.split(rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) route_row(args, row);
  });
}

}  // namespace kdecode::KD_NS
