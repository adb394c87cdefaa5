// AVX-512 with BF16, VBMI and VNNI. Only for tile_dot.cpp.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "native.h"

namespace kdecode::KD_NS {
namespace {

// acc + the products of 16 rows' two weights with the two numbers at `x`.
inline __m512 dot_pair(__m512 acc, __m512i weights, const bf16* x) {
  std::int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
}

// Rows of one pass over the weights: what the registers hold, with two chains of sums a row. More rows take several passes of
// about one size over a block of columns at a time: the later ones find its weights in the first-level cache, and memory has as
// long as all of them take to bring the next block.
constexpr int kPassRows = 8;
constexpr std::int64_t kBlockColumns = 256;

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

// pass(rows, first row), rows a constant.
template <class Pass>
inline void run_pass(int rows, int first, Pass&& pass) {
  switch (rows) {
    case 1: return pass(std::integral_constant<int, 1>{}, first);
    case 2: return pass(std::integral_constant<int, 2>{}, first);
    case 3: return pass(std::integral_constant<int, 3>{}, first);
    case 4: return pass(std::integral_constant<int, 4>{}, first);
    case 5: return pass(std::integral_constant<int, 5>{}, first);
    case 6: return pass(std::integral_constant<int, 6>{}, first);
    case 7: return pass(std::integral_constant<int, 7>{}, first);
    case 8: return pass(std::integral_constant<int, 8>{}, first);
  }
}

// y = the sums of all rows. Of a tile of `Codes` this needs kChains, the number of sums that a row of W has at a time (their order
// is the same for any number of rows), and
//   add<rows>(first column, columns, x, sums)   adds the products of a block to sums [rows, kChains, 16]
//   finish(column)                              every pass over the block that ends there is done
template <class Codes, class X>
void dot_blocks(Codes tile, std::int64_t columns, int num_rows, const X* const* x, float* y) {
  constexpr int kRowSums = Codes::kChains * kTileRows;
  alignas(64) float sums[kMaxRows * kRowSums];
  std::memset(sums, 0, num_rows * kRowSums * sizeof(float));
  const int passes = (num_rows + kPassRows - 1) / kPassRows;
  const std::int64_t block = passes == 1 ? columns : kBlockColumns;
  for (std::int64_t column = 0; column < columns; column += block) {
    const std::int64_t count = columns - column < block ? columns - column : block;
    int first = 0;
    for (int pass = 0; pass < passes; ++pass) {
      const int rows = num_rows / passes + (pass < num_rows % passes);
      run_pass(rows, first, [&](auto constant, int row) {
        tile.template add<decltype(constant)::value>(column, count, x + row, sums + row * kRowSums);
      });
      first += rows;
    }
    tile.finish(column + count);
  }
  for (int r = 0; r < num_rows; ++r) {
    __m512 sum = _mm512_load_ps(sums + r * kRowSums);
    if constexpr (Codes::kChains == 2) sum = _mm512_add_ps(sum, _mm512_load_ps(sums + r * kRowSums + kTileRows));
    _mm512_storeu_ps(y + r * kTileRows, sum);
  }
}

// Two chains of sums a row, those of even and of odd lines: together they hide the latency of one. In memory one after the other.
template <int kRows>
struct LineSums {
  explicit LineSums(const float* memory) {
    for (int r = 0; r < kRows; ++r) {
      even[r] = _mm512_load_ps(memory + 2 * r * kTileRows);
      odd[r] = _mm512_load_ps(memory + (2 * r + 1) * kTileRows);
    }
  }
  void store(float* memory) const {
    for (int r = 0; r < kRows; ++r) {
      _mm512_store_ps(memory + 2 * r * kTileRows, even[r]);
      _mm512_store_ps(memory + (2 * r + 1) * kTileRows, odd[r]);
    }
  }
  // Lines of columns [column, column + 4).
  void add_two(__m512i first, __m512i second, const bf16* const* x, std::int64_t column) {
    for (int r = 0; r < kRows; ++r) {
      even[r] = dot_pair(even[r], first, x[r] + column);
      odd[r] = dot_pair(odd[r], second, x[r] + column + 2);
    }
  }
  __m512 even[kRows], odd[kRows];
};

struct Bf16Codes {
  static constexpr int kChains = 2;

  template <int kRows>
  void add(std::int64_t column, std::int64_t columns, const bf16* const* x, float* memory) const {
    LineSums<kRows> sums(memory);
    const std::int64_t end = column + columns;
    for (; column + 4 <= end; column += 4) {
      const bf16* const at = lines + column * kTileRows;
      prefetch_ahead<kRows>(at);
      prefetch_ahead<kRows>(at + 32);
      sums.add_two(_mm512_loadu_si512(at), _mm512_loadu_si512(at + 32), x, column);
    }
    if (column < end) {
      const __m512i last = _mm512_loadu_si512(lines + column * kTileRows);
      for (int r = 0; r < kRows; ++r) sums.even[r] = dot_pair(sums.even[r], last, x[r] + column);
    }
    sums.store(memory);
  }
  void finish(std::int64_t) {}

  const bf16* lines;
};

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

struct Mxfp4Codes {
  static constexpr int kChains = 1;  // that last longer than a group

  template <int kRows>
  void add(std::int64_t column, std::int64_t columns, const bf16* const* x, float* memory) const {
    const __m512i table = e2m1_table();
    __m512 total[kRows];
    for (int r = 0; r < kRows; ++r) total[r] = _mm512_load_ps(memory + r * kTileRows);
    for (std::int64_t group = column / 32; group < (column + columns) / 32; ++group) {
      __m512 even[kRows], odd[kRows];
      for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int block = 0; block < 4; ++block) {
        const __m512i line = _mm512_loadu_si512(codes + group * 256 + block * 64);
        prefetch_ahead<kRows, kPrefetchRows>(codes + group * 256 + block * 64);
        const std::int64_t at = group * 32 + block * 8;
        const __m512i w0 = decode<0>(line, table);
        for (int r = 0; r < kRows; ++r) even[r] = dot_pair(even[r], w0, x[r] + at);
        const __m512i w1 = decode<1>(line, table);
        for (int r = 0; r < kRows; ++r) odd[r] = dot_pair(odd[r], w1, x[r] + at + 2);
        const __m512i w2 = decode<2>(line, table);
        for (int r = 0; r < kRows; ++r) even[r] = dot_pair(even[r], w2, x[r] + at + 4);
        const __m512i w3 = decode<3>(line, table);
        for (int r = 0; r < kRows; ++r) odd[r] = dot_pair(odd[r], w3, x[r] + at + 6);
      }
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + group * 16));
      const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
      for (int r = 0; r < kRows; ++r) total[r] = _mm512_fmadd_ps(_mm512_add_ps(even[r], odd[r]), scale, total[r]);
    }
    for (int r = 0; r < kRows; ++r) _mm512_store_ps(memory + r * kTileRows, total[r]);
  }
  void finish(std::int64_t) {}

  const std::uint8_t* codes;
  const std::uint8_t* scales;
};

void dot_bf16(const bf16* lines, std::int64_t pairs, int num_rows, const bf16* const* x, float* y) {
  dot_blocks(Bf16Codes{lines}, pairs * 2, num_rows, x, y);
}

void dot_mxfp4(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows, const bf16* const* x,
               float* y) {
  dot_blocks(Mxfp4Codes{codes, scales}, groups * 32, num_rows, x, y);
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
