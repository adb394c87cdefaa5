// Rotation of pairs of channels by a position.
#pragma once

#include "vmath.h"

namespace kdecode::KD_NS {

// Pairs are neighbours; a row of `rotation` has the cosines, then the sines, of `dim` / 2 pairs. Rounded once. Null: a copy.
inline void rotate_pairs(const bf16* x, const float* rotation, int dim, bf16* out) {
  if (rotation == nullptr) {
    std::memcpy(out, x, dim * sizeof(bf16));
    return;
  }
  const float* const cosine = rotation;
  const float* const sine = rotation + dim / 2;
  for (int i = 0; i < dim / 2; ++i) {
    const float a = widen(x[2 * i]), b = widen(x[2 * i + 1]);
    out[2 * i] = round_bf16(a * cosine[i] - b * sine[i]);
    out[2 * i + 1] = round_bf16(b * cosine[i] + a * sine[i]);
  }
}

}  // namespace kdecode::KD_NS
