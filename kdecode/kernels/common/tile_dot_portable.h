// Any processor: plain loops over the 16 rows of a tile, which compilers turn into whatever vectors there are. Only for tile_dot.cpp.
#pragma once

#include <algorithm>
#include <cstring>

#include "native.h"

namespace kdecode::KD_NS {
namespace {

inline float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// sum[i] += row i of `pairs` lines times x.
void add_lines(const bf16* lines, std::int64_t pairs, const bf16* x, float* sum) {
  float acc[kTileRows];
  std::memcpy(acc, sum, sizeof(acc));
  for (std::int64_t p = 0; p < pairs; ++p) {
    std::uint32_t line[kTileRows];
    std::memcpy(line, lines + p * 32, sizeof(line));
    const float x0 = from_bits(static_cast<std::uint32_t>(x[p * 2]) << 16);
    const float x1 = from_bits(static_cast<std::uint32_t>(x[p * 2 + 1]) << 16);
    for (int i = 0; i < kTileRows; ++i) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "the tile formats are little-endian"
#endif
      acc[i] += from_bits(line[i] << 16) * x0;
      acc[i] += from_bits(line[i] & 0xffff0000u) * x1;
    }
  }
  std::memcpy(sum, acc, sizeof(acc));
}

void decode_group(const std::uint8_t* codes, bf16* lines) {
  static constexpr bf16 kTable[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                      0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  for (int block = 0; block < 4; ++block) {
    for (int lane = 0; lane < 32; ++lane) {
      const std::uint8_t* const word = codes + block * 64 + lane * 2;
      bf16* const out = lines + block * 4 * 32 + lane;
      out[0] = kTable[word[0] & 15];
      out[32] = kTable[word[0] >> 4];
      out[64] = kTable[word[1] & 15];
      out[96] = kTable[word[1] >> 4];
    }
  }
}

void dot_bf16(const bf16* lines, std::int64_t pairs, int num_rows, const bf16* const* x, float* y) {
  std::fill(y, y + num_rows * kTileRows, 0.0f);
  // The lines of a piece stay in the first-level cache for all rows.
  constexpr std::int64_t kPiece = 128;
  for (std::int64_t p = 0; p < pairs; p += kPiece) {
    const std::int64_t count = std::min(kPiece, pairs - p);
    for (int r = 0; r < num_rows; ++r) add_lines(lines + p * 32, count, x[r] + p * 2, y + r * kTileRows);
  }
}

void dot_mxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows, const bf16* const* x,
               float* y) {
  std::fill(y, y + num_rows * kTileRows, 0.0f);
  alignas(64) bf16 lines[16 * 32];
  for (std::int64_t group = 0; group < groups; ++group) {
    decode_group(codes + group * 256, lines);
    for (int r = 0; r < num_rows; ++r) {
      float sum[kTileRows] = {};
      add_lines(lines, 16, x[r] + group * 32, sum);
      for (int i = 0; i < kTileRows; ++i) {
        y[r * kTileRows + i] += sum[i] * from_bits(static_cast<std::uint32_t>(scales[group * 16 + i]) << 23);
      }
    }
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
