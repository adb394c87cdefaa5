// Packed bf16 with AVX-512 VBMI, decoded in registers. Only for tile_dot.cpp, after tile_dot_avx512.h.
#pragma once

#include "packed12.h"

namespace kdecode::KD_NS {
namespace {

// The four lines of a block. A lookup uses six bits of an index; the table is there four times, so the upper two, which are the
// neighbouring code's, do not matter.
struct DecodedBlock {
  DecodedBlock(const std::uint8_t* block, __m512i table) {
    const __m512i codes = _mm512_loadu_si512(block + 128);
    const __m512i low01 = _mm512_loadu_si512(block), low23 = _mm512_loadu_si512(block + 64);
    const __m512i high01 = _mm512_permutexvar_epi8(codes, table);
    const __m512i high23 = _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), table);
    line[0] = _mm512_unpacklo_epi8(low01, high01);
    line[1] = _mm512_unpackhi_epi8(low01, high01);
    line[2] = _mm512_unpacklo_epi8(low23, high23);
    line[3] = _mm512_unpackhi_epi8(low23, high23);
  }
  __m512i line[kPacked12Lines];
};

inline __m512i packed12_table(const std::uint8_t* table) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}

void decode_block(const std::uint8_t* block, const std::uint8_t* table, bf16* lines) {
  const DecodedBlock decoded(block, packed12_table(table));
  for (int i = 0; i < kPacked12Lines; ++i) _mm512_storeu_si512(lines + i * 32, decoded.line[i]);
}

// The sums of dot_bf16_rows, in its order: even and odd lines apart.
template <int kRows>
struct LineSums {
  LineSums() {
    for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
  }
  void add(const __m512i* lines, const bf16* const* x, std::int64_t column) {
    for (int i = 0; i < kPacked12Lines; i += 2) {
      for (int r = 0; r < kRows; ++r) {
        even[r] = dot_pair(even[r], lines[i], x[r] + column + i * 2);
        odd[r] = dot_pair(odd[r], lines[i + 1], x[r] + column + i * 2 + 2);
      }
    }
  }
  __m512 even[kRows], odd[kRows];
};

template <int kRows>
void dot_packed12_rows(Packed12Tile tile, const bf16* const* x, float* y) {
  const __m512i table = packed12_table(tile.table);
  LineSums<kRows> sums;
  for (std::int64_t block = 0; block < tile.num_blocks;) {
    const std::int64_t stop = tile.next < tile.end ? corrected_block(*tile.next) : tile.num_blocks;
    for (; block < stop; ++block) {
      const std::uint8_t* const at = tile.blocks + block * kPacked12BlockBytes;
      for (int line = 0; line < 3; ++line) prefetch_ahead<kRows, kPrefetchRows>(at + line * 64);
      const DecodedBlock decoded(at, table);
      sums.add(decoded.line, x, block * kPacked12Columns);
    }
    if (block == tile.num_blocks) break;
    alignas(64) bf16 lines[kPacked12Lines * 32];
    decode_block(tile.blocks + block * kPacked12BlockBytes, tile.table, lines);
    for (; tile.next < tile.end && corrected_block(*tile.next) == block; ++tile.next) correct(*tile.next, lines);
    __m512i corrected[kPacked12Lines];
    for (int i = 0; i < kPacked12Lines; ++i) corrected[i] = _mm512_load_si512(lines + i * 32);
    sums.add(corrected, x, block * kPacked12Columns);
    ++block;
  }
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(y + r * kTileRows, _mm512_add_ps(sums.even[r], sums.odd[r]));
}

void dot_packed12(const Packed12Tile& tile, int num_rows, const bf16* const* x, float* y) {
  switch (num_rows) {
    case 1: return dot_packed12_rows<1>(tile, x, y);
    case 2: return dot_packed12_rows<2>(tile, x, y);
    case 3: return dot_packed12_rows<3>(tile, x, y);
    case 4: return dot_packed12_rows<4>(tile, x, y);
    case 5: return dot_packed12_rows<5>(tile, x, y);
    case 6: return dot_packed12_rows<6>(tile, x, y);
    case 7: return dot_packed12_rows<7>(tile, x, y);
    case 8: return dot_packed12_rows<8>(tile, x, y);
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
