// The functions of vmath.h by name, for tests: the compiled text of each instruction set, vectorised as the kernels are.
#pragma once

#include <cstdint>

namespace kdecode {

using VmathProbe = bool (*)(const char* function, const float* x, const float* second, std::int64_t count, float* out);

}  // namespace kdecode

#ifdef KD_NS
namespace kdecode::KD_NS {

// out[i] = function(x[i]), or situ(x[i], second[i]) with K3's bounds; "bf16" and "fp8" round and widen again, "fp8_code" widens
// the code x[i]. False if there is no such function.
bool vmath_probe(const char* function, const float* x, const float* second, std::int64_t count, float* out);

}  // namespace kdecode::KD_NS
#endif
