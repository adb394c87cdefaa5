// AVX2 with FMA: bf16 is widened to fp32. Only for tile_dot.cpp.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "native.h"
#include "tile_packed12_avx2.h"
#include "packed12_reader.h"

namespace kdecode::KD_NS {
namespace {

constexpr int kPairsAPiece = 128;  // of x widened at a time, and of lines kept in the first-level cache for all rows

inline void widen(const bf16* x, std::int64_t pairs, float* out) {
  for (std::int64_t i = 0; i < pairs * 2; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x[i]) << 16;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
}

// Sums of 16 rows, the products of even and of odd columns apart: four chains.
struct Sums {
  __m256 even[2], odd[2];
};

inline Sums zero_sums() {
  const __m256 zero = _mm256_setzero_ps();
  return {{zero, zero}, {zero, zero}};
}

// sums[r] += `pairs` lines times x[r], for one or two rows.
template <int kRows>
inline void add_lines(const bf16* lines, std::int64_t pairs, const float* const* x, Sums* sums) {
  const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (std::int64_t p = 0; p < pairs; ++p) {
    for (int half = 0; half < 2; ++half) {
      const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines + p * 32 + half * 16));
      const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(line, 16));
      const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(line, high_half));
      for (int r = 0; r < kRows; ++r) {
        sums[r].even[half] = _mm256_fmadd_ps(even, _mm256_broadcast_ss(x[r] + p * 2), sums[r].even[half]);
        sums[r].odd[half] = _mm256_fmadd_ps(odd, _mm256_broadcast_ss(x[r] + p * 2 + 1), sums[r].odd[half]);
      }
    }
  }
}

template <int kWidth>
inline void add_lines(const bf16* lines, std::int64_t pairs, int num_rows, const float (*x)[kWidth], Sums* sums) {
  int r = 0;
  for (; r + 2 <= num_rows; r += 2) {
    const float* const two[2] = {x[r], x[r + 1]};
    Sums local[2] = {sums[r], sums[r + 1]};
    add_lines<2>(lines, pairs, two, local);
    sums[r] = local[0];
    sums[r + 1] = local[1];
  }
  if (r < num_rows) {
    const float* const one[1] = {x[r]};
    Sums local[1] = {sums[r]};
    add_lines<1>(lines, pairs, one, local);
    sums[r] = local[0];
  }
}

// 4-bit codes as bf16 numbers, whose low and high bytes are looked up, and the scales of 8 rows.
struct E2m1 {
  static __m128i low() {
    return _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x40, (char)0x80, (char)0xc0, 0, 0, (char)0x80, (char)0xc0, 0, 0x40,
                         (char)0x80, (char)0xc0);
  }
  static __m128i high() {
    return _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xbf, (char)0xbf, (char)0xbf, (char)0xc0,
                         (char)0xc0, (char)0xc0, (char)0xc0);
  }
  static constexpr int kScaleBytes = 1;
  static __m256 scales(const std::uint8_t* scales) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23));
  }
};

template <class Codes>
inline __m256i decode(__m256i words) {
  const __m256i code = _mm256_and_si256(words, _mm256_set1_epi16(15));
  // The other byte of each word has code 0, whose low byte is 0; the high bytes' lookup is shifted up instead.
  const __m256i low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(Codes::low()), code);
  const __m256i high = _mm256_slli_epi16(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(Codes::high()), code), 8);
  return _mm256_or_si256(low, high);
}

template <class Codes>
inline void decode_codes(const std::uint8_t* codes, bf16* lines) {
  for (int block = 0; block < 4; ++block) {
    for (int half = 0; half < 2; ++half) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + block * 64 + half * 32));
      bf16* const out = lines + block * 4 * 32 + half * 16;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), decode<Codes>(words));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32), decode<Codes>(_mm256_srli_epi16(words, 4)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 64), decode<Codes>(_mm256_srli_epi16(words, 8)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 96), decode<Codes>(_mm256_srli_epi16(words, 12)));
    }
  }
}

inline void decode_group(const std::uint8_t* codes, bf16* lines) { decode_codes<E2m1>(codes, lines); }

template <class Lines>
void dot_lines(Lines& lines, std::int64_t pairs, int num_rows, const bf16* const* x, float* y) {
  float wide[kMaxRows][kPairsAPiece * 2];
  Sums sums[kMaxRows];
  for (int r = 0; r < num_rows; ++r) sums[r] = zero_sums();
  for (std::int64_t p = 0; p < pairs; p += kPairsAPiece) {
    const std::int64_t count = std::min<std::int64_t>(kPairsAPiece, pairs - p);
    for (int r = 0; r < num_rows; ++r) widen(x[r] + p * 2, count, wide[r]);
    add_lines(lines.take(p, count), count, num_rows, wide, sums);
  }
  for (int r = 0; r < num_rows; ++r) {
    for (int half = 0; half < 2; ++half) {
      _mm256_storeu_ps(y + r * kTileRows + half * 8, _mm256_add_ps(sums[r].even[half], sums[r].odd[half]));
    }
  }
}

void dot_bf16(const bf16* lines, std::int64_t pairs, int num_rows, const bf16* const* x, float* y) {
  PlainLines plain{lines};
  dot_lines(plain, pairs, num_rows, x, y);
}

void dot_packed12(const Packed12Tile& tile, int num_rows, const bf16* const* x, float* y) {
  Packed12Lines<kPairsAPiece> lines(tile);
  dot_lines(lines, tile.num_blocks * kPacked12Lines, num_rows, x, y);
}

constexpr int kGroupPairs = 16;

// Pair kNibble of the four of a block: its 16 codes of a row and a half are in `words`.
template <class Codes, int kRows, int kNibble>
inline void add_codes(__m256i words, int half, const float (*x)[32], int column, Sums* sums) {
  const __m256i line = decode<Codes>(_mm256_srli_epi16(words, 4 * kNibble));
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(line, 16));
  const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(line, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  for (int r = 0; r < kRows; ++r) {
    const float* const pair = x[r] + column + 2 * kNibble;
    sums[r].even[half] = _mm256_fmadd_ps(even, _mm256_broadcast_ss(pair), sums[r].even[half]);
    sums[r].odd[half] = _mm256_fmadd_ps(odd, _mm256_broadcast_ss(pair + 1), sums[r].odd[half]);
  }
}

// y[r] += a group's sums of row r, times the scales.
template <class Codes>
inline void add_group(const Sums& sums, const std::uint8_t* scales, float* y) {
  for (int half = 0; half < 2; ++half) {
    const __m256 scale = Codes::scales(scales + half * 8 * Codes::kScaleBytes);
    const __m256 sum = _mm256_add_ps(sums.even[half], sums.odd[half]);
    _mm256_storeu_ps(y + half * 8, _mm256_fmadd_ps(sum, scale, _mm256_loadu_ps(y + half * 8)));
  }
}

// One or two rows: codes are decoded in registers.
template <class Codes, int kRows>
void dot_codes_few(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, const bf16* const* x, float* y) {
  for (std::int64_t group = 0; group < groups; ++group) {
    float wide[kRows][32];
    Sums sums[kRows];
    for (int r = 0; r < kRows; ++r) {
      sums[r] = zero_sums();
      widen(x[r] + group * 32, kGroupPairs, wide[r]);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int block = 0; block < 4; ++block) {
        const std::uint8_t* const at = codes + group * 256 + block * 64 + half * 32;
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        add_codes<Codes, kRows, 0>(words, half, wide, block * 8, sums);
        add_codes<Codes, kRows, 1>(words, half, wide, block * 8, sums);
        add_codes<Codes, kRows, 2>(words, half, wide, block * 8, sums);
        add_codes<Codes, kRows, 3>(words, half, wide, block * 8, sums);
      }
    }
    for (int r = 0; r < kRows; ++r) add_group<Codes>(sums[r], scales + group * 16 * Codes::kScaleBytes, y + r * kTileRows);
  }
}

// More rows: a group is decoded once for all of them. The order of the sums is that of dot_codes_few.
template <class Codes>
void dot_codes_many(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows,
                    const bf16* const* x, float* y) {
  alignas(64) bf16 lines[kGroupPairs * 32];
  float wide[kMaxRows][kGroupPairs * 2];
  for (std::int64_t group = 0; group < groups; ++group) {
    decode_codes<Codes>(codes + group * 256, lines);
    Sums sums[kMaxRows];
    for (int r = 0; r < num_rows; ++r) {
      sums[r] = zero_sums();
      widen(x[r] + group * 32, kGroupPairs, wide[r]);
    }
    add_lines(lines, kGroupPairs, num_rows, wide, sums);
    for (int r = 0; r < num_rows; ++r) add_group<Codes>(sums[r], scales + group * 16 * Codes::kScaleBytes, y + r * kTileRows);
  }
}

template <class Codes>
void dot_codes(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows, const bf16* const* x,
               float* y) {
  std::fill(y, y + num_rows * kTileRows, 0.0f);
  if (num_rows == 1) return dot_codes_few<Codes, 1>(codes, scales, groups, x, y);
  if (num_rows == 2) return dot_codes_few<Codes, 2>(codes, scales, groups, x, y);
  dot_codes_many<Codes>(codes, scales, groups, num_rows, x, y);
}

void dot_mxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows, const bf16* const* x,
               float* y) {
  dot_codes<E2m1>(codes, scales, groups, num_rows, x, y);
}

}  // namespace
}  // namespace kdecode::KD_NS
