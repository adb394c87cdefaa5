#include "vmath_probe.h"

#include <cstring>

#include "vmath.h"

namespace kdecode::KD_NS {
namespace {

template <class Function>
void apply(const float* x, std::int64_t count, float* out, Function&& function) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = function(x[i]);
}

}  // namespace

bool vmath_probe(const char* function, const float* x, const float* second, std::int64_t count, float* out) {
  const auto is = [function](const char* name) { return std::strcmp(function, name) == 0; };
  if (is("exp")) {
    apply(x, count, out, [](float a) { return exp(a); });
  } else if (is("sigmoid")) {
    apply(x, count, out, [](float a) { return sigmoid(a); });
  } else if (is("tanh")) {
    apply(x, count, out, [](float a) { return tanh(a); });
  } else if (is("silu")) {
    apply(x, count, out, [](float a) { return silu(a); });
  } else if (is("bf16")) {
    apply(x, count, out, [](float a) { return widen(round_bf16(a)); });
  } else if (is("fp8")) {
    apply(x, count, out, [](float a) { return widen_fp8(round_fp8(a)); });
  } else if (is("fp8_code")) {
    apply(x, count, out, [](float a) { return widen_fp8(static_cast<fp8>(a)); });
  } else if (is("situ")) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = situ(x[i], second[i], 4.0f, 25.0f);
  } else {
    return false;
  }
  return true;
}

}  // namespace kdecode::KD_NS
