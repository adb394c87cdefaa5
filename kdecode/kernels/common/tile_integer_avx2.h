// Integer weights with AVX2: a group is decoded once for all rows. Only for tile_dot.cpp, after tile_dot_avx2.h.
#pragma once

#include "integer_tiles.h"

namespace kdecode::KD_NS {
namespace {

template <int kBits>
void dot_integers(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t groups, int num_rows,
                  const bf16* const* x, float* y) {
  std::fill(y, y + num_rows * kTileRows, 0.0f);
  alignas(64) bf16 lines[kGroupPairs * 32];
  float wide[kMaxRows][kGroupPairs * 2];
  for (std::int64_t group = 0; group < groups; ++group) {
    decode_integers<kBits>(codes + group * integer_group_bytes(kBits), lines);
    Sums sums[kMaxRows];
    for (int r = 0; r < num_rows; ++r) {
      sums[r] = zero_sums();
      widen(x[r] + group * 32, kGroupPairs, wide[r]);
    }
    add_lines(lines, kGroupPairs, num_rows, wide, sums);
    for (int half = 0; half < 2; ++half) {
      const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + group * 32 + half * 16));
      const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
      for (int r = 0; r < num_rows; ++r) {
        float* const to = y + r * kTileRows + half * 8;
        const __m256 sum = _mm256_add_ps(sums[r].even[half], sums[r].odd[half]);
        _mm256_storeu_ps(to, _mm256_fmadd_ps(sum, scale, _mm256_loadu_ps(to)));
      }
    }
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
