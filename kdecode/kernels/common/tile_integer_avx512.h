// Integer weights with AVX-512, decoded in registers. Only for tile_dot.cpp, after tile_dot_avx512.h.
#pragma once

#include "integer_tiles.h"

namespace kdecode::KD_NS {
namespace {

// bf16 of `step` times each code, twice, as in e2m1_table: codes are signed, or 0 to 15.
inline __m512i whole_table(int step, bool is_signed) {
  alignas(32) bf16 values[16];
  for (int code = 0; code < 16; ++code) values[code] = whole_bf16(step * (is_signed ? signed_nibble(code) : code));
  return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(values)));
}

// 8 bits are two nibbles with products of their own, 16 * high + low: both exact in bf16, and the sums are fp32.
template <int kBits>
struct IntegerCodes {
  static constexpr int kChains = 1;  // that last longer than a group

  template <int kRows>
  void add(std::int64_t column, std::int64_t columns, const bf16* const* x, float* memory) const {
    const __m512i high_table = whole_table(kBits == 8 ? 16 : 1, true), low_table = whole_table(1, false);
    __m512 total[kRows];
    for (int r = 0; r < kRows; ++r) total[r] = _mm512_load_ps(memory + r * kTileRows);
    for (std::int64_t group = column / 32; group < (column + columns) / 32; ++group) {
      __m512 even[kRows], odd[kRows];
      for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int block = 0; block < kIntegerBlocks; ++block) {
        const std::uint8_t* const at = codes + group * integer_group_bytes(kBits) + block * kBits * 16;
        prefetch_ahead<kRows, kPrefetchRows>(at);
        if constexpr (kBits == 8) prefetch_ahead<kRows, kPrefetchRows>(at + 64);
        const __m512i high = _mm512_loadu_si512(at);
        const __m512i low = kBits == 8 ? _mm512_loadu_si512(at + 64) : high;
        const std::int64_t first = group * 32 + block * 8;
        add_pair<kRows, 0>(high, low, high_table, low_table, x, first, even);
        add_pair<kRows, 1>(high, low, high_table, low_table, x, first, odd);
        add_pair<kRows, 2>(high, low, high_table, low_table, x, first, even);
        add_pair<kRows, 3>(high, low, high_table, low_table, x, first, odd);
      }
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + group * 32));
      const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
      for (int r = 0; r < kRows; ++r) total[r] = _mm512_fmadd_ps(_mm512_add_ps(even[r], odd[r]), scale, total[r]);
    }
    for (int r = 0; r < kRows; ++r) _mm512_store_ps(memory + r * kTileRows, total[r]);
  }
  void finish(std::int64_t) {}

  template <int kRows, int kNibble>
  static void add_pair(__m512i high, __m512i low, __m512i high_table, __m512i low_table, const bf16* const* x,
                       std::int64_t first, __m512* sums) {
    const __m512i high_line = decode<kNibble>(high, high_table);
    for (int r = 0; r < kRows; ++r) sums[r] = dot_pair(sums[r], high_line, x[r] + first + 2 * kNibble);
    if constexpr (kBits == 8) {
      const __m512i low_line = decode<kNibble>(low, low_table);
      for (int r = 0; r < kRows; ++r) sums[r] = dot_pair(sums[r], low_line, x[r] + first + 2 * kNibble);
    }
  }

  const std::uint8_t* codes;
  const std::uint8_t* scales;
};

template <int kBits>
void dot_integers(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows,
                  const bf16* const* x, float* y) {
  dot_blocks(IntegerCodes<kBits>{codes, scales}, groups * 32, num_rows, x, y);
}

}  // namespace
}  // namespace kdecode::KD_NS
