// mla_front: everything of an MLA layer before its output projection. See op.py for the maths.
#pragma once

#include "../common/exchange.h"
#include "../common/native.h"
#include "../common/residual.h"
#include "../common/threads.h"

namespace kdecode {

struct MlaFrontArgs {
  MixNorm mix;       // its norm_out is the input of in_proj
  Tiles in_proj;     // columns of mla_proj: query [q_rank, or heads * qk_dim without q_b], latent, rope part, gate
  Tiles q_b;         // [heads * (nope_dim + rope_dim), q_rank]; no data: the query columns are the query
  Tiles w_uk;        // [heads * kv_rank, nope_dim]
  Tiles w_uv;        // [heads * v_dim, kv_rank]
  const float* q_norm = nullptr;   // [q_rank], with q_b only
  const float* kv_norm = nullptr;  // [kv_rank]

  const std::int32_t* row_position = nullptr;  // [rows]: tokens cached before the row's own
  const std::int32_t* row_pages = nullptr;     // [rows, max_pages]
  const std::int32_t* row_context = nullptr;   // [rows]: tokens that the row sees; null: those before its own, and itself
  const float* row_rotation = nullptr;         // [rows, rope_dim]: cosines, then sines, of each pair; null: nothing turns
  void* pages = nullptr;                       // [num_pages, page_rows, kv_rank + rope_dim], bf16 or fp8
  const bf16* fp8_values = nullptr;            // [256]: value of each code, scaled; null: the pages are bf16
  float fp8_scale = 1;                         // stored = x / fp8_scale

  bf16* mla_proj = nullptr;    // [rows, in_proj.rows]
  bf16* query_norm = nullptr;  // [rows, q_rank], scratch
  bf16* mla_query = nullptr;   // [rows, heads, kv_rank + rope_dim]
  bf16* mla_latent = nullptr;  // [rows, heads, kv_rank]
  bf16* attn_out = nullptr;    // [rows, heads * v_dim]
  // Of each (row, split of the context, head): largest score and sum of exponentials; weighted sum of latents. Heads of all ranks.
  float* split_stats = nullptr;  // [rows, max_splits, heads, 2]
  float* split_sums = nullptr;   // [rows, max_splits, heads, kv_rank]

  // Through which the ranks attend to each other's cache rows; null: all rows are here. A rank has `interleave` positions of a
  // request, then the next rank as many, and so on.
  SharedExchange* exchange = nullptr;
  std::int32_t interleave = 1;

  float latent_eps = 0;  // of the query norm and the latent norm
  float softmax_scale = 0;
  bool has_gate = false;
  std::int32_t heads = 0;  // of this rank
  std::int32_t kv_rank = 0;
  std::int32_t nope_dim = 0;
  std::int32_t rope_dim = 0;
  std::int32_t v_dim = 0;
  std::int32_t page_rows = 0;  // of one rank, on which a page covers as many positions for each
  std::int32_t max_pages = 0;
  std::int32_t split_tokens = 0;  // cache rows of one split of the context, a constant of the plan
  std::int32_t max_splits = 0;
};

inline constexpr int kMaxMlaWidth = 1024;  // kv_rank + rope_dim, bound of scratch memory
inline constexpr int kMaxMlaHeadDim = 512;  // nope_dim + rope_dim

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void mla_front(const MlaFrontArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
