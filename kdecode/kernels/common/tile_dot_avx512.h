// AVX-512 with BF16 and VBMI. Only for tile_dot.cpp.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "native.h"

namespace kdecode::KD_NS {
namespace {

// acc + the products of 16 rows' two weights with the two numbers at `x`.
inline __m512 dot_pair(__m512 acc, __m512i weights, const bf16* x) {
  std::int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
}

// With few rows a loop waits for memory, and the hardware prefetcher does better alone; from here on it waits for arithmetic, so
// that too few loads are in flight for the prefetcher to keep up.
constexpr int kPrefetchRows = 3;
// From here on a line takes long enough to come from the second-level cache, and what is fetched far ahead is not evicted there.
constexpr int kFarPrefetchRows = 6;

// Asks for what is a few lines after `at`. Not kept within the tile: the next one usually follows, and asking for an address that
// does not exist is harmless.
template <int kRows, int kFarRows = kFarPrefetchRows>
inline void prefetch_ahead(const void* at) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(at);
  if constexpr (kRows >= kFarRows) {
    _mm_prefetch(reinterpret_cast<const char*>(address + 8192), _MM_HINT_T1);
  } else if constexpr (kRows >= kPrefetchRows) {
    _mm_prefetch(reinterpret_cast<const char*>(address + 4096), _MM_HINT_T0);
  }
}

template <int kRows>
void dot_bf16_rows(const bf16* lines, std::int64_t pairs, const bf16* const* x, float* y) {
  // Even and odd pairs apart: two chains a row hide the latency of one.
  __m512 even[kRows], odd[kRows];
  for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
  std::int64_t p = 0;
  for (; p + 2 <= pairs; p += 2) {
    prefetch_ahead<kRows>(lines + p * 32);
    prefetch_ahead<kRows>(lines + p * 32 + 32);
    const __m512i first = _mm512_loadu_si512(lines + p * 32);
    const __m512i second = _mm512_loadu_si512(lines + p * 32 + 32);
    for (int r = 0; r < kRows; ++r) {
      even[r] = dot_pair(even[r], first, x[r] + p * 2);
      odd[r] = dot_pair(odd[r], second, x[r] + p * 2 + 2);
    }
  }
  if (p < pairs) {
    const __m512i last = _mm512_loadu_si512(lines + p * 32);
    for (int r = 0; r < kRows; ++r) even[r] = dot_pair(even[r], last, x[r] + p * 2);
  }
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(y + r * kTileRows, _mm512_add_ps(even[r], odd[r]));
}

// The 16 E2M1 values as bf16, twice: a lookup uses 5 bits of an index, and the fifth is the next code's lowest.
inline __m512i e2m1_table() {
  const __m256i once = _mm256_setr_epi16(0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000,
                                         (short)0xbf00, (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040,
                                         (short)0xc080, (short)0xc0c0);
  return _mm512_broadcast_i64x4(once);
}

// Columns 2 * kNibble and 2 * kNibble + 1 of a line of codes, as a line of bf16.
template <int kNibble>
inline __m512i decode(__m512i codes, __m512i table) {
  return _mm512_permutexvar_epi16(kNibble == 0 ? codes : _mm512_srli_epi16(codes, 4 * kNibble), table);
}

template <int kRows>
void dot_mxfp4_rows(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, const bf16* const* x, float* y) {
  const __m512i table = e2m1_table();
  __m512 total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_setzero_ps();
  for (std::int64_t group = 0; group < groups; ++group) {
    __m512 even[kRows], odd[kRows];
    for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int block = 0; block < 4; ++block) {
      const __m512i line = _mm512_loadu_si512(codes + group * 256 + block * 64);
      prefetch_ahead<kRows, kPrefetchRows>(codes + group * 256 + block * 64);
      const std::int64_t column = group * 32 + block * 8;
      const __m512i w0 = decode<0>(line, table);
      for (int r = 0; r < kRows; ++r) even[r] = dot_pair(even[r], w0, x[r] + column);
      const __m512i w1 = decode<1>(line, table);
      for (int r = 0; r < kRows; ++r) odd[r] = dot_pair(odd[r], w1, x[r] + column + 2);
      const __m512i w2 = decode<2>(line, table);
      for (int r = 0; r < kRows; ++r) even[r] = dot_pair(even[r], w2, x[r] + column + 4);
      const __m512i w3 = decode<3>(line, table);
      for (int r = 0; r < kRows; ++r) odd[r] = dot_pair(odd[r], w3, x[r] + column + 6);
    }
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + group * 16));
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
    for (int r = 0; r < kRows; ++r) total[r] = _mm512_fmadd_ps(_mm512_add_ps(even[r], odd[r]), scale, total[r]);
  }
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(y + r * kTileRows, total[r]);
}

void dot_bf16(const bf16* lines, std::int64_t pairs, int num_rows, const bf16* const* x, float* y) {
  switch (num_rows) {
    case 1: return dot_bf16_rows<1>(lines, pairs, x, y);
    case 2: return dot_bf16_rows<2>(lines, pairs, x, y);
    case 3: return dot_bf16_rows<3>(lines, pairs, x, y);
    case 4: return dot_bf16_rows<4>(lines, pairs, x, y);
    case 5: return dot_bf16_rows<5>(lines, pairs, x, y);
    case 6: return dot_bf16_rows<6>(lines, pairs, x, y);
    case 7: return dot_bf16_rows<7>(lines, pairs, x, y);
    case 8: return dot_bf16_rows<8>(lines, pairs, x, y);
  }
}

void dot_mxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows, const bf16* const* x,
               float* y) {
  switch (num_rows) {
    case 1: return dot_mxfp4_rows<1>(codes, scales, groups, x, y);
    case 2: return dot_mxfp4_rows<2>(codes, scales, groups, x, y);
    case 3: return dot_mxfp4_rows<3>(codes, scales, groups, x, y);
    case 4: return dot_mxfp4_rows<4>(codes, scales, groups, x, y);
    case 5: return dot_mxfp4_rows<5>(codes, scales, groups, x, y);
    case 6: return dot_mxfp4_rows<6>(codes, scales, groups, x, y);
    case 7: return dot_mxfp4_rows<7>(codes, scales, groups, x, y);
    case 8: return dot_mxfp4_rows<8>(codes, scales, groups, x, y);
  }
}

void decode_group(const std::uint8_t* codes, bf16* lines) {
  const __m512i table = e2m1_table();
  for (int block = 0; block < 4; ++block) {
    const __m512i line = _mm512_loadu_si512(codes + block * 64);
    bf16* const out = lines + block * 4 * 32;
    _mm512_storeu_si512(out, decode<0>(line, table));
    _mm512_storeu_si512(out + 32, decode<1>(line, table));
    _mm512_storeu_si512(out + 64, decode<2>(line, table));
    _mm512_storeu_si512(out + 96, decode<3>(line, table));
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
