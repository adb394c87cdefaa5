// Weights as integers with a scale for 16 rows of 32 columns: the formats kInt4 and kInt8 (see native.h). Only for tile_dot.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "native.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kIntegerBlocks = 4;  // of 8 columns in a group of kInt4
constexpr int kIntegerPairs = 16;  // of columns in a group of kInt8: 32 bytes each

// Bytes of codes of a group.
constexpr std::int64_t integer_group_bytes(int bits) { return bits * 64; }

inline std::int32_t signed_nibble(std::uint32_t code) { return static_cast<std::int32_t>((code & 15) ^ 8) - 8; }

inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// A whole number from -128 to 127, which bf16 holds exactly.
inline bf16 whole_bf16(std::int32_t value) { return static_cast<bf16>(bits_of_float(static_cast<float>(value)) >> 16); }

// A group's codes -> 16 kBf16 lines of whole numbers, not scaled. Without tables, so that the loops over lanes vectorise.
void decode_int4(const std::uint8_t* codes, bf16* lines) {
  for (int block = 0; block < kIntegerBlocks; ++block) {
    std::uint16_t words[32];
    std::memcpy(words, codes + block * 64, sizeof(words));
    for (int nibble = 0; nibble < 4; ++nibble) {
      bf16* const out = lines + (block * 4 + nibble) * 32;
      for (int lane = 0; lane < 32; ++lane) out[lane] = whole_bf16(signed_nibble(words[lane] >> (4 * nibble)));
    }
  }
}

void decode_int8(const std::uint8_t* codes, bf16* lines) {
  for (int i = 0; i < kIntegerPairs * 32; ++i) lines[i] = whole_bf16(static_cast<std::int8_t>(codes[i]));
}

// Whole numbers times their scales, rounded to the nearest bf16.
void scale_integers(bf16* lines, const std::uint8_t* scales) {
  std::uint16_t scale_bits[kTileRows];
  std::memcpy(scale_bits, scales, sizeof(scale_bits));
  for (int i = 0; i < 16 * 32; ++i) {
    const float scale = float_of_bits(static_cast<std::uint32_t>(scale_bits[i % 32 / 2]) << 16);
    const std::uint32_t bits = bits_of_float(float_of_bits(static_cast<std::uint32_t>(lines[i]) << 16) * scale);
    lines[i] = static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

// What kInt8 is multiplied by: for every 32 columns, whole numbers of at most 15 bits and their step, a power of two, with which
// the largest of them has all its bits. A bf16 number has 8 bits: those down to 2^-7 of a group's largest are exact, and smaller
// ones are off by at most 2^-15 of it. A product with a code has 22 bits, so that a group's 32 fit into 32 bits and their sum is
// exact in any order.
//
// The step of a group with NaN or an infinity is NaN, and so are then all sums of the row.
void round_inputs(const bf16* __restrict x, std::int64_t cols, std::int16_t* __restrict numbers) {
  constexpr std::uint32_t kTopBit = 14;     // of the largest number
  constexpr std::uint32_t kBias = 127;      // of an fp32 exponent
  constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: what is added to it comes out rounded, in its low bits
  for (std::int64_t group = 0; group < cols / 32; ++group) {
    const bf16* const in = x + group * 32;
    std::int16_t* const out = numbers + group * 32;
    std::int16_t largest = 0;
    for (int i = 0; i < 32; ++i) {
      const std::int16_t size = static_cast<std::int16_t>(in[i] & 0x7fff);
      largest = size > largest ? size : largest;
    }
    const std::uint32_t exponent = static_cast<std::uint32_t>(largest) >> 7;
    // Steps are normal fp32 numbers, so the smallest groups have fewer bits.
    const std::uint32_t used = exponent > kTopBit ? exponent : kTopBit + 1;
    const std::uint32_t step = exponent == 255 ? 0x7fc00000u : (used - kTopBit) << 23;
    std::memcpy(numbers + cols + group * 2, &step, sizeof(step));
    const float inverse = float_of_bits((2 * kBias + kTopBit - used) << 23);
    for (int i = 0; i < 32; ++i) {
      const float number = float_of_bits(static_cast<std::uint32_t>(in[i]) << 16) * inverse;
      out[i] = static_cast<std::int16_t>(bits_of_float(number + kRounding));
    }
  }
}

// The step of a group in a row of x: `cols` numbers, then the steps.
inline float step_of(const std::int16_t* row, std::int64_t cols, std::int64_t group) {
  float step;
  std::memcpy(&step, row + cols + group * 2, sizeof(step));
  return step;
}

}  // namespace
}  // namespace kdecode::KD_NS
