// Per-instruction-set interface of the tile kernels. Include it inside files compiled once per set, after KD_NS is defined.
#pragma once

#include "native.h"

#ifndef KD_NS
#error "compile through the per-instruction-set targets, which define KD_NS"
#endif

namespace kdecode::KD_NS {

// y[r * 16 + i] = sum_k W[tile * 16 + i, k] * x[r][k] for r < num_rows <= kMaxRows, fp32 accumulation in a fixed order that does
// not depend on the number of rows. x[r] are rows of w.cols numbers at any addresses (gathered rows are fine): bf16, or what
// prepare_row made of them where w.input_bytes() is not 0.
void tile_dot(const Tiles& w, std::int64_t tile, int num_rows, const void* const* x, float* y);

// out (w.input_bytes() bytes, 4-byte aligned) = a bf16 row of w.cols numbers as tile_dot reads it; w.input_bytes() is not 0.
void prepare_row(const Tiles& w, const bf16* x, void* out);

// out[i, :] = W[tile * 16 + i, :] for the rows of the tile that the matrix has: bf16, w.cols numbers a row, dequantised if MXFP4
// (exact: a code has two significant bits) and rounded to the nearest bf16 if integers.
void unpack_tile(const Tiles& w, std::int64_t tile, bf16* out);

}  // namespace kdecode::KD_NS
