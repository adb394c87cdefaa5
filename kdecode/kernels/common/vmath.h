// Elementwise fp32 maths and number formats, branch-free so that plain loops over them vectorise.
//
// Everything lives in KD_NS: the same text is compiled once per instruction set, and no copy may be merged with another's.
// Errors are at most 3 ulp (exp 1, tanh 1.5) wherever no intermediate is denormal; results do not depend on how a loop around
// them is vectorised.
// Assumes round-to-nearest; needs no -ffast-math and must not be given it (roundings are done with magic constants).
#pragma once

#include <cstdint>
#include <cstring>

#include "native.h"

#ifndef KD_NS
#error "compile through the per-instruction-set targets, which define KD_NS"
#endif

namespace kdecode::KD_NS {

inline std::uint32_t float_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float bits_float(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// a * b + c: fused where the instruction set has it, never a library call.
inline float mul_add(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline float absolute(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }

// |x| with the sign of `sign`.
inline float with_sign(float x, float sign) {
  return bits_float((float_bits(x) & 0x7fffffffu) | (float_bits(sign) & 0x80000000u));
}

// e^x: 0 below -104, infinity above 88.73, denormal results included, NaN kept.
inline float exp(float x) {
  const float high = x > 89.0f ? 89.0f : x;
  const float clamped = high < -104.0f ? -104.0f : high;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low mantissa bits
  const float shifted = mul_add(clamped, 1.44269504088896341f, magic);
  const std::int32_t n = static_cast<std::int32_t>(float_bits(shifted) - float_bits(magic));
  const float whole = shifted - magic;
  // ln 2 in two parts, the first with few enough bits that whole * part is exact.
  const float r = mul_add(whole, 2.12194440e-4f, mul_add(whole, -0.693359375f, clamped));
  float p = 1.9875691500e-4f;
  p = mul_add(p, r, 1.3981999507e-3f);
  p = mul_add(p, r, 8.3334519073e-3f);
  p = mul_add(p, r, 4.1665795894e-2f);
  p = mul_add(p, r, 1.6666665459e-1f);
  p = mul_add(p, r, 5.0000001201e-1f);
  const float power = mul_add(p, r * r, r) + 1.0f;
  // 2^n in two factors, so that neither leaves the range of normal numbers.
  const std::int32_t half = n >> 1;
  const float low_scale = bits_float(static_cast<std::uint32_t>(half + 127) << 23);
  const float high_scale = bits_float(static_cast<std::uint32_t>(n - half + 127) << 23);
  return power * low_scale * high_scale;
}

// 1 / (1 + e^-x); keeps tiny values below x = -88 and has no inf / inf.
inline float sigmoid(float x) {
  const float e = exp(-absolute(x));
  const float numerator = x >= 0.0f ? 1.0f : e;
  return numerator / (1.0f + e);
}

inline float tanh(float x) {
  const float a = absolute(x);
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = mul_add(p, z, 2.06390887954e-2f);
  p = mul_add(p, z, -5.37397155531e-2f);
  p = mul_add(p, z, 1.33314422036e-1f);
  p = mul_add(p, z, -3.33332819422e-1f);
  const float small = mul_add(p * z, x, x);
  const float large = 1.0f - 2.0f / (exp(a + a) + 1.0f);
  return a < 0.625f ? small : with_sign(large, x);
}

// x * sigmoid(x); the limit 0 at -infinity.
inline float silu(float x) {
  const float lowest = -3.40282347e38f;
  const float bounded = x < lowest ? lowest : x;
  return bounded * sigmoid(bounded);
}

// SiTU: [beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)].
inline float situ(float gate, float up, float beta, float linear_beta) {
  return beta * tanh(gate / beta) * sigmoid(gate) * (linear_beta * tanh(up / linear_beta));
}

inline float widen(bf16 x) { return bits_float(static_cast<std::uint32_t>(x) << 16); }

// Nearest bfloat16, ties to even; NaN stays NaN (quiet).
inline bf16 round_bf16(float x) {
  const std::uint32_t bits = float_bits(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<bf16>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// E4M3 without infinities: the code 0x7f (either sign) is NaN, the largest number 448.
inline float widen_fp8(fp8 code) {
  const std::uint32_t magnitude = code & 0x7fu;
  const float normal = bits_float((magnitude << 20) + (120u << 23));
  // Exponent field 0: m / 8 * 2^-6, as a difference of normal numbers (right even where denormals are flushed).
  const float tiny = bits_float((magnitude << 20) | (121u << 23)) - 0.015625f;
  const float number = magnitude < 8u ? tiny : normal;
  const std::uint32_t bits = magnitude == 0x7fu ? 0x7fc00000u : float_bits(number);
  return bits_float(bits | (static_cast<std::uint32_t>(code & 0x80u) << 24));
}

// Nearest E4M3, ties to even, clamped to +-448; NaN stays NaN.
inline fp8 round_fp8(float x) {
  const std::uint32_t bits = float_bits(x);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const float a = absolute(x);
  const float clamped = a > 448.0f ? 448.0f : a;
  const std::uint32_t magnitude = float_bits(clamped);
  const std::uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 the spacing is 2^-9, which is the spacing of fp32 at 2^14.
  const std::uint32_t tiny = float_bits(clamped + 16384.0f) - float_bits(16384.0f);
  const std::uint32_t number = clamped < 0.015625f ? tiny : normal;
  const std::uint32_t code = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fu : number;
  return static_cast<fp8>(code | sign);
}

}  // namespace kdecode::KD_NS
