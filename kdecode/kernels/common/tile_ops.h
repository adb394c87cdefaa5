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

// Weight bytes of one claim of Worker::split: small enough for the threads to finish together, large enough for a thread that helps
// another to read some of its stretch in one stream.
inline constexpr std::int64_t kClaimBytes = 128 * 1024;

// Columns of one claim of an elementwise phase.
inline constexpr std::int64_t kClaimColumns = 256;

// Units of one claim, if a unit reads `unit_bytes`.
inline std::int64_t units_per_claim(std::int64_t unit_bytes) {
  const std::int64_t units = kClaimBytes / (unit_bytes > 0 ? unit_bytes : 1);
  return units > 1 ? units : 1;
}

// Rows of x that one thread multiplies matrices of one width with.
class Rows {
 public:
  explicit Rows(Worker& worker) : worker_(worker) {}
  // Of a row-major buffer.
  Rows(Worker& worker, const bf16* base, int count, std::int64_t stride) : worker_(worker), count_(count) {
    for (int r = 0; r < count; ++r) plain_[r] = base + r * stride;
  }

  // Other rows instead; `row(r)` is the address of one.
  template <class Row>
  void set(int count, Row&& row) {
    count_ = count;
    is_prepared_ = false;
    for (int r = 0; r < count; ++r) plain_[r] = row(r);
  }

  int count() const { return count_; }

  // As tile_dot reads them with `w`. Prepared rows are in the thread's scratch, so that they last until other Rows prepare theirs.
  const void* const* of(const Tiles& w) {
    if (w.input_bytes() == 0) return plain_;
    if (!is_prepared_) prepare(w);
    return prepared_;
  }

 private:
  void prepare(const Tiles& w) {
    const std::int64_t bytes = w.input_bytes();
    auto* const memory = static_cast<char*>(worker_.scratch(count_ * bytes));
    for (int r = 0; r < count_; ++r) {
      prepare_row(w, static_cast<const bf16*>(plain_[r]), memory + r * bytes);
      prepared_[r] = memory + r * bytes;
    }
    is_prepared_ = true;
  }

  Worker& worker_;
  int count_ = 0;
  bool is_prepared_ = false;
  const void* plain_[kMaxRows];
  const void* prepared_[kMaxRows];
};

// y[r * 16 + i] = the products of all rows, as the other tile_dot.
inline void tile_dot(const Tiles& w, std::int64_t tile, Rows& x, float* y) { tile_dot(w, tile, x.count(), x.of(w), y); }

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
inline void linear_tile(const Tiles& w, std::int64_t tile, Rows& x, Out* out, std::int64_t stride) {
  float sums[kMaxRows * kTileRows];
  tile_dot(w, tile, x, sums);
  const int width = tile_width(w, tile);
  for (int r = 0; r < x.count(); ++r) {
    for (int i = 0; i < width; ++i) put(sums[r * kTileRows + i], out + r * stride + tile * kTileRows + i);
  }
}

// out = W x of all tiles, [x.count(), W.rows], split over the threads by bytes. No barrier at the end.
template <class Out>
inline void linear_tiles(const Tiles& w, Rows& x, Out* out, Worker& worker) {
  worker.split(w.num_tiles(), units_per_claim(w.tile_bytes()), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t tile = first; tile < last; ++tile) linear_tile(w, tile, x, out, w.rows);
  });
}

// Tiles 2 * pair and 2 * pair + 1 of an interleaved gate_up matrix: out[r][pair * 16 + i] = act(gate, up), rounded once from
// gate and up as linear outputs (bf16).
inline void gated_pair(const Tiles& gate_up, std::int64_t pair, Rows& x, const Activation& activation, bf16* const* out) {
  float gate[kMaxRows * kTileRows];
  float up[kMaxRows * kTileRows];
  tile_dot(gate_up, 2 * pair, x, gate);
  tile_dot(gate_up, 2 * pair + 1, x, up);
  const int count = x.count() * kTileRows;
  for (int i = 0; i < count; ++i) {
    gate[i] = widen(round_bf16(gate[i]));
    up[i] = widen(round_bf16(up[i]));
  }
  if (activation.is_situ) {
    for (int i = 0; i < count; ++i) gate[i] = situ(gate[i], up[i], activation.beta, activation.linear_beta);
  } else {
    for (int i = 0; i < count; ++i) gate[i] = silu(gate[i]) * up[i];
  }
  for (int r = 0; r < x.count(); ++r) {
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
