// Products of small fp32 matrices that are in the caches, for kernels made of them. One thread, sums in a fixed order.
#pragma once

#include "vec.h"

namespace kdecode::KD_NS {
namespace {

// Rows or columns may be anywhere: element (i, k) of a left factor is at data[i * row_step + k * column_step].
struct Left {
  const float* data;
  std::int64_t row_step, column_step;
};

// Row-major, rows `step` numbers apart.
struct Right {
  const float* data;
  std::int64_t step;
};

enum class Sum { kSet, kAdd, kSubtract };

// 4 rows and N vectors of columns of the result.
template <Sum kSum, int N>
inline void product_tile(const Left& a, const Right& b, std::int64_t depth, float* c, std::int64_t c_step) {
  constexpr int kRows = 4;
  vec acc[kRows][N] = {};
  for (std::int64_t k = 0; k < depth; ++k) {
    vec right[N];
    for (int n = 0; n < N; ++n) right[n] = load(b.data + k * b.step + n * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const vec left = splat(a.data[i * a.row_step + k * a.column_step]);
      for (int n = 0; n < N; ++n) acc[i][n] = mul_add(left, right[n], acc[i][n]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int n = 0; n < N; ++n) {
      float* const at = c + i * c_step + n * kLanes;
      if constexpr (kSum == Sum::kSet) store(at, acc[i][n]);
      if constexpr (kSum == Sum::kAdd) store(at, load(at) + acc[i][n]);
      if constexpr (kSum == Sum::kSubtract) store(at, load(at) - acc[i][n]);
    }
  }
}

// c = a b, c += a b or c -= a b; `rows` is a multiple of 4, `columns` of 16.
template <Sum kSum>
inline void product(std::int64_t rows, std::int64_t columns, std::int64_t depth, const Left& a, const Right& b, float* c,
                    std::int64_t c_step) {
  constexpr int kWide = kLanes == 16 ? 4 : 2;
  for (std::int64_t column = 0; column < columns;) {
    const bool is_wide = column + kWide * kLanes <= columns;
    const Right right{b.data + column, b.step};
    for (std::int64_t row = 0; row < rows; row += 4) {
      const Left left{a.data + row * a.row_step, a.row_step, a.column_step};
      float* const at = c + row * c_step + column;
      if (is_wide) {
        product_tile<kSum, kWide>(left, right, depth, at, c_step);
      } else {
        product_tile<kSum, 1>(left, right, depth, at, c_step);
      }
    }
    column += (is_wide ? kWide : 1) * kLanes;
  }
}

}  // namespace
}  // namespace kdecode::KD_NS
