// Integer weights on any processor. Only for tile_dot.cpp, after tile_dot_portable.h.
#pragma once

#include "integer_tiles.h"

namespace kdecode::KD_NS {
namespace {

template <int kBits>
void dot_integers(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows,
                  const bf16* const* x, float* y) {
  std::fill(y, y + num_rows * kTileRows, 0.0f);
  alignas(64) bf16 lines[16 * 32];
  for (std::int64_t group = 0; group < groups; ++group) {
    decode_integers<kBits>(codes + group * integer_group_bytes(kBits), lines);
    std::uint16_t scale[kTileRows];
    std::memcpy(scale, scales + group * 32, sizeof(scale));
    for (int r = 0; r < num_rows; ++r) {
      float sum[kTileRows] = {};
      add_lines(lines, 16, x[r] + group * 32, sum);
      for (int i = 0; i < kTileRows; ++i) {
        y[r * kTileRows + i] += sum[i] * from_bits(static_cast<std::uint32_t>(scale[i]) << 16);
      }
    }
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
