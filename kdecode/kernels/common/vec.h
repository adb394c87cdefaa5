// Native-width fp32 vectors for loops that must keep several accumulators in registers. Where one accumulator is enough, write a
// plain loop over vmath.h instead.
//
// `vec` is a compiler vector type: + - * and comparisons work lane by lane, in registers, on every instruction set.
#pragma once

#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "native.h"

#ifndef KD_NS
#error "compile through the per-instruction-set targets, which define KD_NS"
#endif

namespace kdecode::KD_NS {

#if defined(__AVX512BF16__)
using vec = __m512;
#elif defined(__AVX2__)
using vec = __m256;
#else
using vec = float __attribute__((vector_size(16)));
#endif

inline constexpr int kLanes = sizeof(vec) / sizeof(float);

inline vec load(const float* x) {
  vec v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}

inline void store(float* out, vec v) { std::memcpy(out, &v, sizeof(v)); }

inline vec splat(float x) {
#if defined(__AVX512BF16__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return vec{x, x, x, x};
#endif
}

// a * b + c, fused where the instruction set has it.
inline vec mul_add(vec a, vec b, vec c) {
#if defined(__AVX512BF16__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// kLanes neighbouring bf16 numbers, widened.
inline vec load(const bf16* x) {
#if defined(__AVX512BF16__)
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16));
#elif defined(__AVX2__)
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
#else
  std::uint32_t bits[kLanes];
  for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<std::uint32_t>(x[i]) << 16;
  vec v;
  std::memcpy(&v, bits, sizeof(v));
  return v;
#endif
}

// Sum of the lanes, in a fixed order.
inline float sum(vec v) {
#if defined(__AVX512BF16__)
  return _mm512_reduce_add_ps(v);
#else
  float total = v[0];
  for (int i = 1; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// out[i] = sum of v[i]'s lanes, in one order for all four.
inline void sum_each(const vec (&v)[4], float* out) {
#if defined(__AVX2__)
#if defined(__AVX512BF16__)
  __m256 half[4];
  for (int i = 0; i < 4; ++i) half[i] = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
#else
  const vec(&half)[4] = v;
#endif
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
#endif
}

}  // namespace kdecode::KD_NS
