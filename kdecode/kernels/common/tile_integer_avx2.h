// Integer weights with AVX2. Only for tile_dot.cpp, after tile_dot_avx2.h.
#pragma once

#include "integer_tiles.h"

namespace kdecode::KD_NS {
namespace {

// 8 bf16 scales, widened.
inline __m256 load_scales(const std::uint8_t* scales) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

// The codes of kInt4.
struct Int4 {
  static __m128i low() {
    return _mm_setr_epi8(0, (char)0x80, 0, 0x40, (char)0x80, (char)0xa0, (char)0xc0, (char)0xe0, 0, (char)0xe0, (char)0xc0,
                         (char)0xa0, (char)0x80, 0x40, 0, (char)0x80);
  }
  static __m128i high() {
    return _mm_setr_epi8(0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, (char)0xc1, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0,
                         (char)0xc0, (char)0xc0, (char)0xbf);
  }
  static constexpr int kScaleBytes = 2;
  static __m256 scales(const std::uint8_t* scales) { return load_scales(scales); }
};

void dot_int4(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows, const bf16* const* x,
              float* y) {
  dot_codes<Int4>(codes, scales, groups, num_rows, x, y);
}

constexpr int kInt8PassRows = 4;  // what the registers hold, with two vectors of sums a row

// y[r] += a group's products with x[r], for r < kRows.
template <int kRows>
void add_int8(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t group, std::int64_t cols,
              const std::int16_t* const* x, float* y) {
  __m256i sum[kRows][2];
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int pair = 0; pair < kIntegerPairs; ++pair) {
    const auto* const at = reinterpret_cast<const __m128i*>(codes + pair * 32);
    const __m256i line[2] = {_mm256_cvtepi8_epi16(_mm_loadu_si128(at)), _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1))};
    for (int r = 0; r < kRows; ++r) {
      std::int32_t numbers;
      std::memcpy(&numbers, x[r] + group * 32 + pair * 2, sizeof(numbers));
      for (int half = 0; half < 2; ++half) {
        sum[r][half] = _mm256_add_epi32(sum[r][half], _mm256_madd_epi16(line[half], _mm256_set1_epi32(numbers)));
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    const __m256 scale = load_scales(scales + half * 16);
    for (int r = 0; r < kRows; ++r) {
      const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(step_of(x[r], cols, group)));
      float* const to = y + r * kTileRows + half * 8;
      _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][half]), factor, _mm256_loadu_ps(to)));
    }
  }
}

void dot_int8(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows,
              const std::int16_t* const* x, float* y) {
  constexpr decltype(&add_int8<1>) kAdd[kInt8PassRows] = {add_int8<1>, add_int8<2>, add_int8<3>, add_int8<4>};
  std::fill(y, y + num_rows * kTileRows, 0.0f);
  for (std::int64_t group = 0; group < groups; ++group) {
    for (int r = 0; r < num_rows; r += kInt8PassRows) {
      const int rows = std::min(kInt8PassRows, num_rows - r);
      kAdd[rows - 1](codes + group * integer_group_bytes(8), scales + group * 32, group, groups * 32, x + r, y + r * kTileRows);
    }
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
