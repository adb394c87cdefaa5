// Weights as integers with a scale for 16 rows of 32 columns: the formats kInt4 and kInt8 (see native.h). Only for tile_dot.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "native.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kIntegerBlocks = 4;  // of 8 columns in a group

// Bytes of codes of a group.
constexpr std::int64_t integer_group_bytes(int bits) { return bits * 64; }

inline std::int32_t signed_nibble(std::uint32_t code) { return static_cast<std::int32_t>((code & 15) ^ 8) - 8; }

// A whole number from -128 to 127, which bf16 holds exactly.
inline bf16 whole_bf16(std::int32_t value) {
  const float number = static_cast<float>(value);
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return static_cast<bf16>(bits >> 16);
}

// A group's codes -> 16 kBf16 lines of whole numbers, not scaled. Without tables, so that the loops over lanes vectorise.
template <int kBits>
void decode_integers(const std::uint8_t* codes, bf16* lines) {
  for (int block = 0; block < kIntegerBlocks; ++block) {
    std::uint16_t high[32], low[32] = {};
    std::memcpy(high, codes + block * kBits * 16, sizeof(high));
    if (kBits == 8) std::memcpy(low, codes + block * kBits * 16 + 64, sizeof(low));
    for (int nibble = 0; nibble < 4; ++nibble) {
      bf16* const out = lines + (block * 4 + nibble) * 32;
      for (int lane = 0; lane < 32; ++lane) {
        const std::int32_t code = signed_nibble(high[lane] >> (4 * nibble));
        out[lane] = whole_bf16(kBits == 8 ? code * 16 + (low[lane] >> (4 * nibble) & 15) : code);
      }
    }
  }
}

// Whole numbers times their scales, rounded to the nearest bf16.
void scale_integers(bf16* lines, const std::uint8_t* scales) {
  std::uint16_t scale_bits[kTileRows];
  std::memcpy(scale_bits, scales, sizeof(scale_bits));
  const auto wide = [](std::uint32_t bits) {
    bits <<= 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  };
  for (int i = 0; i < 16 * 32; ++i) {
    const float product = wide(lines[i]) * wide(scale_bits[i % 32 / 2]);
    std::uint32_t bits;
    std::memcpy(&bits, &product, sizeof(bits));
    lines[i] = static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
