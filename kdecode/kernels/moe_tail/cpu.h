// The second half of a mixture of experts: experts, latent up projection, the down projection of the shared experts, residual.
#pragma once

#include "../common/exchange.h"
#include "../common/native.h"
#include "../common/tile_ops.h"

namespace kdecode {

class Worker;

struct MoeTailArgs {
  Activation activation;
  const TileList* expert_gate_up = nullptr;     // E of [2 * F, in], interleaved
  const TileList* expert_down = nullptr;        // E of [in, F]
  const bf16* expert_in = nullptr;              // [rows, in]
  const std::int32_t* route_ids = nullptr;      // [rows, top_k]
  const float* route_weights = nullptr;         // [rows, top_k]
  bf16* expert_product = nullptr;               // scratch [rows * top_k, F]
  bf16* expert_out = nullptr;                   // scratch [rows * top_k, in]; null with an exchange
  float* expert_part = nullptr;                 // scratch [rows * top_k, in], with an exchange
  bf16* expert_sum = nullptr;                   // [rows, in]
  const float* latent_norm = nullptr;           // [in]; null: none
  bf16* normed = nullptr;                       // scratch [rows, in], with latent_norm
  Tiles latent_up;                              // [width, in], this rank's part; no rows: in is the model width
  bf16* routed = nullptr;                       // [rows, width], with latent_up
  Tiles shared_down;                            // [width, S]; no rows: no shared experts
  const bf16* shared_product = nullptr;         // [rows, S]
  bf16* shared = nullptr;                       // [rows, width]
  bf16* mlp_delta = nullptr;                    // [rows, width]
  bf16* prefix = nullptr;                       // [rows, width], mutated
  SharedExchange* exchange = nullptr;           // null: this is the only rank; else F and S are its parts
  float eps = 0;
  std::int32_t rows = 0;
  std::int32_t top_k = 0;                       // at most kMaxTopK
  std::int64_t width = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void moe_tail(const MoeTailArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
