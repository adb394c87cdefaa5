// The prologue that every block shares: attention residual mix, then RMSNorm, of one row.
#pragma once

#include "native.h"
#include "threads.h"

namespace kdecode {

inline constexpr int kMaxSnapshots = 63;

struct MixNorm {
  const bf16* prefix = nullptr;       // [rows, width]
  const bf16* snapshots = nullptr;    // [num_snapshots, rows, width]
  const float* mix_weight = nullptr;  // [width], norm weight times score projection; null: the mix is the prefix
  const float* norm_weight = nullptr;
  bf16* mix_out = nullptr;   // [rows, width]
  bf16* norm_out = nullptr;  // [rows, width]
  float eps = 0;             // of the RMSNorm and of the mix's scores
  std::int32_t num_snapshots = 0;  // at most kMaxSnapshots
  std::int32_t rows = 0;
  std::int64_t width = 0;
};

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

// The mix of one row to `out`; there is a mix_weight.
void mix_row(const MixNorm& args, int row, bf16* out);

// mix_out[row], norm_out[row] of one row, single-threaded; rounding points as in ARCHITECTURE.md.
void mix_norm_row(const MixNorm& args, int row);

// All rows, split over the threads; with the barrier after which any of them may read norm_out.
inline void mix_norm(const MixNorm& args, Worker& worker) {
  worker.split(args.rows, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) mix_norm_row(args, static_cast<int>(row));
  });
  worker.barrier();
}

// out = bf16(x * rsqrt(mean(x^2) + eps) * weight), fp32 inside, rounded once; `out` may be `x`.
void rms_norm_row(const bf16* x, const float* weight, float eps, std::int64_t width, bf16* out);

}  // namespace kdecode::KD_NS
#endif
