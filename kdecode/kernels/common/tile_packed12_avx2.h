// Packed bf16 with AVX2: a block decoded to memory. Only for tile_dot.cpp.
#pragma once

#include <immintrin.h>

#include "packed12.h"

namespace kdecode::KD_NS {
namespace {

inline void decode_block(const std::uint8_t* block, const std::uint8_t* table, bf16* lines) {
  const __m256i high_bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int half = 0; half < 2; ++half) {  // of every line
    const auto load = [&](int at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + at + half * 32)); };
    const auto store = [&](int line, __m256i value) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(lines + line * 32 + half * 16), value);
    };
    const __m256i codes = load(128), low01 = load(0), low23 = load(64);
    const __m256i high01 = _mm256_shuffle_epi8(high_bytes, _mm256_and_si256(codes, nibble));
    const __m256i high23 = _mm256_shuffle_epi8(high_bytes, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
    store(0, _mm256_unpacklo_epi8(low01, high01));
    store(1, _mm256_unpackhi_epi8(low01, high01));
    store(2, _mm256_unpacklo_epi8(low23, high23));
    store(3, _mm256_unpackhi_epi8(low23, high23));
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
