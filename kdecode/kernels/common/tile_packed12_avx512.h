// Packed bf16 with AVX-512 VBMI, decoded in registers. Only for tile_dot.cpp, after tile_dot_avx512.h.
#pragma once

#include <algorithm>

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

// The sums of Bf16Codes, in its order.
struct Packed12Codes {
  static constexpr int kChains = 2;

  template <int kRows>
  void add(std::int64_t column, std::int64_t columns, const bf16* const* x, float* memory) const {
    const __m512i table = packed12_table(tile.table);
    LineSums<kRows> sums(memory);
    const std::uint32_t* next = tile.next;
    const std::int64_t end = (column + columns) / kPacked12Columns;
    for (std::int64_t block = column / kPacked12Columns; block < end;) {
      const std::int64_t corrected = next < tile.end ? corrected_block(*next) : end;
      for (; block < std::min(corrected, end); ++block) {
        const std::uint8_t* const at = tile.blocks + block * kPacked12BlockBytes;
        for (int line = 0; line < 3; ++line) prefetch_ahead<kRows, kPrefetchRows>(at + line * 64);
        const DecodedBlock decoded(at, table);
        for (int i = 0; i < kPacked12Lines; i += 2) {
          sums.add_two(decoded.line[i], decoded.line[i + 1], x, block * kPacked12Columns + i * 2);
        }
      }
      if (block == end) break;
      alignas(64) bf16 lines[kPacked12Lines * 32];
      decode_block(tile.blocks + block * kPacked12BlockBytes, tile.table, lines);
      for (; next < tile.end && corrected_block(*next) == block; ++next) correct(*next, lines);
      for (int i = 0; i < kPacked12Lines; i += 2) {
        sums.add_two(_mm512_load_si512(lines + i * 32), _mm512_load_si512(lines + i * 32 + 32), x,
                     block * kPacked12Columns + i * 2);
      }
      ++block;
    }
    sums.store(memory);
  }
  // The corrections of all blocks before `column` have been used.
  void finish(std::int64_t column) {
    while (tile.next < tile.end && corrected_block(*tile.next) < column / kPacked12Columns) ++tile.next;
  }

  Packed12Tile tile;
};

void dot_packed12(const Packed12Tile& tile, int num_rows, const bf16* const* x, float* y) {
  dot_blocks(Packed12Codes{tile}, tile.num_blocks * kPacked12Columns, num_rows, x, y);
}

}  // namespace
}  // namespace kdecode::KD_NS
