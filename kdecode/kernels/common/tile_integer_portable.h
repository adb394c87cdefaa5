// Integer weights on any processor. Only for tile_dot.cpp, after tile_dot_portable.h.
#pragma once

#include "integer_tiles.h"

namespace kdecode::KD_NS {
namespace {

// y[i] += sum[i] times row i's scale, times `step`.
template <class Sum>
inline void add_scaled(const Sum* sum, const std::uint8_t* scales, float step, float* y) {
  std::uint16_t scale[kTileRows];
  std::memcpy(scale, scales, sizeof(scale));
  for (int i = 0; i < kTileRows; ++i) {
    y[i] += static_cast<float>(sum[i]) * (from_bits(static_cast<std::uint32_t>(scale[i]) << 16) * step);
  }
}

void dot_int4(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows, const bf16* const* x,
              float* y) {
  std::fill(y, y + num_rows * kTileRows, 0.0f);
  alignas(64) bf16 lines[16 * 32];
  for (std::int64_t group = 0; group < groups; ++group) {
    decode_int4(codes + group * integer_group_bytes(4), lines);
    for (int r = 0; r < num_rows; ++r) {
      float sum[kTileRows] = {};
      add_lines(lines, 16, x[r] + group * 32, sum);
      add_scaled(sum, scales + group * 32, 1.0f, y + r * kTileRows);
    }
  }
}

// A group's codes, row by row: sums along a row are what compilers have an instruction for.
inline void transpose_int8(const std::uint8_t* codes, std::int16_t* rows) {
  std::int16_t pairs[kIntegerPairs * 32];
  for (int i = 0; i < kIntegerPairs * 32; ++i) pairs[i] = static_cast<std::int8_t>(codes[i]);
  for (int row = 0; row < kTileRows; ++row) {
    for (int pair = 0; pair < kIntegerPairs; ++pair) {
      std::memcpy(rows + row * 32 + pair * 2, pairs + pair * 32 + row * 2, 2 * sizeof(*rows));
    }
  }
}

void dot_int8(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows,
              const std::int16_t* const* x, float* y) {
  std::fill(y, y + num_rows * kTileRows, 0.0f);
  alignas(64) std::int16_t rows[kTileRows * 32];
  for (std::int64_t group = 0; group < groups; ++group) {
    transpose_int8(codes + group * integer_group_bytes(8), rows);
    for (int r = 0; r < num_rows; ++r) {
      const std::int16_t* const in = x[r] + group * 32;
      std::int32_t sum[kTileRows] = {};
      for (int i = 0; i < kTileRows; ++i) {
        for (int column = 0; column < 32; ++column) sum[i] += std::int32_t{rows[i * 32 + column]} * in[column];
      }
      add_scaled(sum, scales + group * 32, step_of(x[r], groups * 32, group), y + r * kTileRows);
    }
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
