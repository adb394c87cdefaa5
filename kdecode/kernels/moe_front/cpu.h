// The first half of a mixture of experts: mix, norm, routing, latent down projection, and the gate/up product of the shared
// experts, which reads the same input.
#pragma once

#include "../common/exchange.h"
#include "../common/native.h"
#include "../common/residual.h"
#include "../common/tile_ops.h"

namespace kdecode {

class Worker;

struct MoeFrontArgs {
  MixNorm mix;
  Activation activation;
  Tiles router;                         // [E, width], this rank's part of the rows
  const float* router_bias = nullptr;   // [E], selection only
  Tiles latent_down;                    // [L, width], this rank's part; no rows: experts work at the model width
  Tiles shared_gate_up;                 // [2 * S, width], interleaved; no rows: no shared experts
  float* router_logits = nullptr;       // scratch [rows, E]
  std::int32_t* route_ids = nullptr;    // [rows, top_k], in the order of selection
  float* route_weights = nullptr;       // [rows, top_k]
  bf16* latent = nullptr;               // [rows, L]
  bf16* shared_product = nullptr;       // [rows, S]
  SharedExchange* exchange = nullptr;   // null: this is the only rank
  float routed_scaling = 1;
  std::int32_t top_k = 0;               // at most kMaxTopK and E
  bool is_renormalized = false;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void moe_front(const MoeFrontArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
