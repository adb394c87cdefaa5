// What the fused ops do with a tile's fp32 sums: round, activate, add to the residual; and how much one claim of work is.
#pragma once

#include "native.h"

namespace kdecode {

// Gated activation: silu(g) * u, or SiTU with its two bounds.
struct Activation {
  bool is_situ = false;
  float beta = 0;         // SiTU only
  float linear_beta = 0;  // SiTU only
};

}  // namespace kdecode

#ifdef KD_NS
#include "threads.h"
#include "tile_dot.h"
#include "vmath.h"

namespace kdecode::KD_NS {

// Weight bytes of one claim of Worker::split: large enough for the hardware prefetcher to run (it restarts at each claim),
// small enough for the threads to finish together.
inline constexpr std::int64_t kClaimBytes = 128 * 1024;

// Columns of one claim of an elementwise phase.
inline constexpr std::int64_t kClaimColumns = 256;

// Units of one claim, if a unit reads `unit_bytes`.
inline std::int64_t units_per_claim(std::int64_t unit_bytes) {
  const std::int64_t units = kClaimBytes / (unit_bytes > 0 ? unit_bytes : 1);
  return units > 1 ? units : 1;
}

// Addresses of the rows of a row-major buffer.
struct Rows {
  Rows(const bf16* base, int rows, std::int64_t stride) {
    for (int r = 0; r < rows; ++r) at[r] = base + r * stride;
  }
  const bf16* at[kMaxRows];
};

// Output rows of W that a tile really has (the last one may be padded).
inline int tile_width(const Tiles& w, std::int64_t tile) {
  const std::int64_t left = w.rows - tile * kTileRows;
  return static_cast<int>(left < kTileRows ? left : kTileRows);
}

// A product as a linear output, and as the part of one that other ranks add to.
inline void put(float sum, bf16* out) { *out = round_bf16(sum); }
inline void put(float sum, float* out) { *out = sum; }

// out[r * stride + tile * 16 + i] = W x[r], rounded if Out is bf16.
template <class Out>
inline void linear_tile(const Tiles& w, std::int64_t tile, int num_rows, const bf16* const* x, Out* out, std::int64_t stride) {
  float sums[kMaxRows * kTileRows];
  tile_dot(w, tile, num_rows, x, sums);
  const int width = tile_width(w, tile);
  for (int r = 0; r < num_rows; ++r) {
    for (int i = 0; i < width; ++i) put(sums[r * kTileRows + i], out + r * stride + tile * kTileRows + i);
  }
}

// out = W x of all tiles, [num_rows, W.rows], split over the threads by bytes. No barrier at the end.
template <class Out>
inline void linear_tiles(const Tiles& w, int num_rows, const bf16* const* x, Out* out, Worker& worker) {
  worker.split(w.num_tiles(), units_per_claim(w.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) linear_tile(w, tile, num_rows, x, out, w.rows);
  });
}

// Tiles 2 * pair and 2 * pair + 1 of an interleaved gate_up matrix: out[r][pair * 16 + i] = act(gate, up), rounded once from
// gate and up as linear outputs (bf16).
inline void gated_pair(const Tiles& gate_up, std::int64_t pair, int num_rows, const bf16* const* x,
                       const Activation& activation, bf16* const* out) {
  float gate[kMaxRows * kTileRows];
  float up[kMaxRows * kTileRows];
  tile_dot(gate_up, 2 * pair, num_rows, x, gate);
  tile_dot(gate_up, 2 * pair + 1, num_rows, x, up);
  const int count = num_rows * kTileRows;
  for (int i = 0; i < count; ++i) {
    gate[i] = widen(round_bf16(gate[i]));
    up[i] = widen(round_bf16(up[i]));
  }
  if (activation.is_situ) {
    for (int i = 0; i < count; ++i) gate[i] = situ(gate[i], up[i], activation.beta, activation.linear_beta);
  } else {
    for (int i = 0; i < count; ++i) gate[i] = silu(gate[i]) * up[i];
  }
  for (int r = 0; r < num_rows; ++r) {
    for (int i = 0; i < kTileRows; ++i) out[r][pair * kTileRows + i] = round_bf16(gate[r * kTileRows + i]);
  }
}

// body(row, first column, number of columns) over a [rows, width] buffer, in blocks of columns split over the threads.
template <class Body>
void split_columns(Worker& worker, std::int64_t rows, std::int64_t width, Body&& body) {
  const std::int64_t blocks = (width + kClaimColumns - 1) / kClaimColumns;
  worker.split(rows * blocks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t start = i % blocks * kClaimColumns;
      body(i / blocks, start, static_cast<int>(width - start < kClaimColumns ? width - start : kClaimColumns));
    }
  });
}

// prefix[i] = bf16(prefix[i] + delta[i]).
inline void add_residual(const bf16* delta, std::int64_t count, bf16* prefix) {
  for (std::int64_t i = 0; i < count; ++i) prefix[i] = round_bf16(widen(prefix[i]) + widen(delta[i]));
}

}  // namespace kdecode::KD_NS
#endif
