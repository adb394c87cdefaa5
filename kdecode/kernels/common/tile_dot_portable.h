// Any processor: plain loops over the 16 rows of a tile, which compilers turn into whatever vectors there are. Only for tile_dot.cpp.
#pragma once

#include <algorithm>
#include <cstring>

#include "native.h"
#include "tile_packed12_portable.h"
#include "packed12_reader.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "the tile formats are little-endian"
#endif

namespace kdecode::KD_NS {
namespace {

inline float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// sum[i] += row i of `pairs` lines times x. Kept out of line: GCC 12 vectorises the copies that it inlines worse.
__attribute__((noinline)) void add_lines(const bf16* lines, std::int64_t pairs, const bf16* x, float* sum) {
  float acc[kTileRows];
  std::memcpy(acc, sum, sizeof(acc));
  for (std::int64_t p = 0; p < pairs; ++p) {
    std::uint32_t line[kTileRows];
    std::memcpy(line, lines + p * 32, sizeof(line));
    const float x0 = from_bits(static_cast<std::uint32_t>(x[p * 2]) << 16);
    const float x1 = from_bits(static_cast<std::uint32_t>(x[p * 2 + 1]) << 16);
    for (int i = 0; i < kTileRows; ++i) {
      acc[i] += from_bits(line[i] << 16) * x0;
      acc[i] += from_bits(line[i] & 0xffff0000u) * x1;
    }
  }
  std::memcpy(sum, acc, sizeof(acc));
}

// A code (sign, two bits of exponent, one of mantissa) as bf16, without a table so that loops over it vectorise.
inline bf16 e2m1(std::uint32_t code) {
  const std::uint32_t size = code & 7;
  // From 1.0 on (code 2) both formats count up in the same steps; below are 0 and 0.5.
  const std::uint32_t bits = size > 1 ? 0x3f00 + size * 0x40 : size * 0x3f00;
  return static_cast<bf16>(bits | (code & 8) << 12);
}

void decode_group(const std::uint8_t* codes, bf16* lines) {
  for (int block = 0; block < 4; ++block) {
    std::uint16_t words[32];
    std::memcpy(words, codes + block * 64, sizeof(words));
    for (int nibble = 0; nibble < 4; ++nibble) {
      bf16* const out = lines + (block * 4 + nibble) * 32;
      for (int lane = 0; lane < 32; ++lane) out[lane] = e2m1(words[lane] >> (4 * nibble));
    }
  }
}

constexpr std::int64_t kPiece = 128;  // lines that stay in the first-level cache for all rows

template <class Lines>
void dot_lines(Lines& lines, std::int64_t pairs, int num_rows, const bf16* const* x, float* y) {
  std::fill(y, y + num_rows * kTileRows, 0.0f);
  for (std::int64_t p = 0; p < pairs; p += kPiece) {
    const std::int64_t count = std::min(kPiece, pairs - p);
    const bf16* const piece = lines.take(p, count);
    for (int r = 0; r < num_rows; ++r) add_lines(piece, count, x[r] + p * 2, y + r * kTileRows);
  }
}

void dot_bf16(const bf16* lines, std::int64_t pairs, int num_rows, const bf16* const* x, float* y) {
  PlainLines plain{lines};
  dot_lines(plain, pairs, num_rows, x, y);
}

void dot_packed12(const Packed12Tile& tile, int num_rows, const bf16* const* x, float* y) {
  Packed12Lines<kPiece> lines(tile);
  dot_lines(lines, tile.num_blocks * kPacked12Lines, num_rows, x, y);
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
