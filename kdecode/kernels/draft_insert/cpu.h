// draft_insert: the cache rows of one layer of a latent-attention draft. See op.py for the maths.
#pragma once

#include "../common/native.h"
#include "../common/threads.h"

namespace kdecode {

struct DraftInsertArgs {
  Tiles proj;                                  // [kv_rank + rope_dim, width]
  const bf16* context = nullptr;               // [rows, width]
  bf16* projected = nullptr;                   // [rows, kv_rank + rope_dim]
  const float* kv_norm = nullptr;              // [kv_rank]
  const std::int32_t* row_position = nullptr;  // [rows]
  const std::int32_t* row_pages = nullptr;     // [rows, max_pages]
  const float* row_rotation = nullptr;         // [rows, rope_dim]: cosines, then sines
  bf16* pages = nullptr;                       // [num_pages, page_tokens, kv_rank + rope_dim]
  float latent_eps = 0;
  std::int32_t kv_rank = 0;
  std::int32_t rope_dim = 0;
  std::int32_t page_tokens = 0;
  std::int32_t max_pages = 0;
  std::int32_t rows = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

void draft_insert(const DraftInsertArgs& args, Worker& worker);

}  // namespace kdecode::KD_NS
#endif
