// Integer weights with AVX-512 (VNNI for kInt8), decoded in registers. Only for tile_dot.cpp, after tile_dot_avx512.h.
#pragma once

#include "integer_tiles.h"

namespace kdecode::KD_NS {
namespace {

// 16 bf16 scales, widened.
inline __m512 load_scales(const std::uint8_t* scales) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

// The 16 whole numbers as bf16, twice, as in e2m1_table.
inline __m512i int4_table() {
  alignas(32) bf16 values[16];
  for (int code = 0; code < 16; ++code) values[code] = whole_bf16(signed_nibble(code));
  return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(values)));
}

struct Int4Codes {
  static constexpr int kChains = 1;  // that last longer than a group

  template <int kRows>
  void add(std::int64_t column, std::int64_t columns, const bf16* const* x, float* memory) const {
    const __m512i table = int4_table();
    __m512 total[kRows];
    for (int r = 0; r < kRows; ++r) total[r] = _mm512_load_ps(memory + r * kTileRows);
    for (std::int64_t group = column / 32; group < (column + columns) / 32; ++group) {
      __m512 even[kRows], odd[kRows];
      for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int block = 0; block < kIntegerBlocks; ++block) {
        const std::uint8_t* const at = codes + group * integer_group_bytes(4) + block * 64;
        prefetch_ahead<kRows, kPrefetchRows>(at);
        const __m512i line = _mm512_loadu_si512(at);
        const std::int64_t first = group * 32 + block * 8;
        add_pair<kRows, 0>(line, table, x, first, even);
        add_pair<kRows, 1>(line, table, x, first, odd);
        add_pair<kRows, 2>(line, table, x, first, even);
        add_pair<kRows, 3>(line, table, x, first, odd);
      }
      const __m512 scale = load_scales(scales + group * 32);
      for (int r = 0; r < kRows; ++r) total[r] = _mm512_fmadd_ps(_mm512_add_ps(even[r], odd[r]), scale, total[r]);
    }
    for (int r = 0; r < kRows; ++r) _mm512_store_ps(memory + r * kTileRows, total[r]);
  }
  void finish(std::int64_t) {}

  template <int kRows, int kNibble>
  static void add_pair(__m512i codes, __m512i table, const bf16* const* x, std::int64_t first, __m512* sums) {
    const __m512i line = decode<kNibble>(codes, table);
    for (int r = 0; r < kRows; ++r) sums[r] = dot_pair(sums[r], line, x[r] + first + 2 * kNibble);
  }

  const std::uint8_t* codes;
  const std::uint8_t* scales;
};

// acc + the products of 16 rows' two whole numbers with the two at `x`.
inline __m512i dot_pair(__m512i acc, __m512i weights, const std::int16_t* x) {
  std::int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return _mm512_dpwssd_epi32(acc, weights, _mm512_set1_epi32(pair));
}

struct Int8Codes {
  static constexpr int kChains = 1;  // that last longer than a group

  template <int kRows>
  void add(std::int64_t column, std::int64_t columns, const std::int16_t* const* x, float* memory) const {
    // Of a group's sum, which has no order: one chain of few rows does not hide the latency of a product.
    constexpr int kParts = kRows <= 4 ? 2 : 1;
    __m512 total[kRows];
    for (int r = 0; r < kRows; ++r) total[r] = _mm512_load_ps(memory + r * kTileRows);
    for (std::int64_t group = column / 32; group < (column + columns) / 32; ++group) {
      __m512i sum[kParts][kRows];
      for (int part = 0; part < kParts; ++part) {
        for (int r = 0; r < kRows; ++r) sum[part][r] = _mm512_setzero_si512();
      }
#pragma GCC unroll 16
      for (int pair = 0; pair < kIntegerPairs; ++pair) {
        const std::uint8_t* const at = codes + group * integer_group_bytes(8) + pair * 32;
        if (pair % 2 == 0) prefetch_ahead<kRows, kPrefetchRows>(at);
        const __m512i line = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
        for (int r = 0; r < kRows; ++r) {
          sum[pair % kParts][r] = dot_pair(sum[pair % kParts][r], line, x[r] + group * 32 + pair * 2);
        }
      }
      const __m512 scale = load_scales(scales + group * 32);
      for (int r = 0; r < kRows; ++r) {
        const __m512i whole = kParts == 1 ? sum[0][r] : _mm512_add_epi32(sum[0][r], sum[kParts - 1][r]);
        const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(step_of(x[r], cols, group)));
        total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), factor, total[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) _mm512_store_ps(memory + r * kTileRows, total[r]);
  }
  void finish(std::int64_t) {}

  const std::uint8_t* codes;
  const std::uint8_t* scales;
  std::int64_t cols;
};

void dot_int4(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows, const bf16* const* x,
              float* y) {
  dot_blocks(Int4Codes{codes, scales}, groups * 32, num_rows, x, y);
}

void dot_int8(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows,
              const std::int16_t* const* x, float* y) {
  dot_blocks(Int8Codes{codes, scales, groups * 32}, groups * 32, num_rows, x, y);
}

}  // namespace
}  // namespace kdecode::KD_NS
