// kda_front: everything of a KDA layer before its output projection. See op.py for the maths.
#pragma once

#include "../common/native.h"
#include "../common/residual.h"
#include "../common/threads.h"

namespace kdecode {

struct KdaFrontArgs {
  MixNorm mix;       // its norm_out is the input of in_proj; its eps is also that of the output norm
  Tiles in_proj;     // columns of kda_proj: q, k, v [heads * head_dim each], gate [gate_rank], f_a [decay_rank], b [heads]
  Tiles f_b;         // [heads * head_dim, decay_rank]
  Tiles g_b;         // [heads * head_dim, gate_rank]; no data: the gate columns are the gate
  const float* conv = nullptr;         // [4, 3 * heads * head_dim], newest tap last
  const float* decay_scale = nullptr;  // [heads], exp(A_log)
  const float* dt_bias = nullptr;      // [heads * head_dim]
  const float* out_norm = nullptr;     // [head_dim]

  const std::int32_t* row_slot = nullptr;  // [rows]; rows of one slot are its tokens in order
  bf16* window = nullptr;                  // [slots, 3, 3 * heads * head_dim], oldest sample first
  float* state = nullptr;                  // [slots, heads, head_dim (K), head_dim (V)]

  bf16* kda_proj = nullptr;    // [rows, in_proj.rows]
  bf16* kda_qkv = nullptr;     // [rows, 3 * heads * head_dim]
  float* kda_decay = nullptr;  // [rows, heads, head_dim]
  float* kda_beta = nullptr;   // [rows, heads]
  bf16* kda_out = nullptr;     // [rows, heads, head_dim]
  bf16* attn_out = nullptr;    // [rows, heads * head_dim]

  // What each row would do to its slot, recorded instead of done: window and state are only read. All null, or none.
  float* keys = nullptr;         // [rows, heads, head_dim], normalised
  float* decays = nullptr;       // [rows, heads, head_dim], log domain
  float* corrections = nullptr;  // [rows, heads, head_dim], u of the delta rule
  bf16* samples = nullptr;       // [rows, 3 * heads * head_dim], raw columns of kda_proj

  float gate_lower_bound = 0;  // of the sigmoid gate; ignored by the softplus gate
  bool is_softplus_gate = false;
  std::int32_t heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t gate_rank = 0;
  std::int32_t decay_rank = 0;
};

// Bounds of scratch memory.
inline constexpr int kMaxKdaHeadDim = 256;
inline constexpr int kMaxVerifyRows = 9;  // rows of one slot that are recorded: the anchor and eight drafts

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void kda_front(const KdaFrontArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
