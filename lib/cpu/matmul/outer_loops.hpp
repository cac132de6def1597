// Products whose reduction runs along the rows of the weight, as in the gradient. T is a type of an
// unnamed namespace (loops.hpp).
#pragma once

#include <cstdint>

#include "cpu/isa/unroll.hpp"
#include "cpu/matmul/kernels.hpp"

namespace nf4::cpu {

// The number of rows that an operand interleaves: two for bf16.
template <class T>
constexpr int kRowsOfOperand = T::kLanes / T::kSumLanes;

template <class T, int kM, int kV>
void outer_block(const OuterArgs &args, int m, int column) {
  using Item = typename T::Item;
  const Item *w = static_cast<const Item *>(args.w) + column * kRowsOfOperand<T>;
  const Item *x[kM];
  typename T::Sum sums[kM][kV];
  NF4_UNROLL
  for (int j = 0; j < kM; ++j) {
    x[j] = static_cast<const Item *>(args.x) + (m + j) * args.x_stride;
    NF4_UNROLL
    for (int v = 0; v < kV; ++v) sums[j][v] = T::zero();
  }
  for (int64_t n = 0; n < args.rows; n += kRowsOfOperand<T>, w += args.w_stride) {
    typename T::Operand values[kV];
    NF4_UNROLL
    for (int v = 0; v < kV; ++v) values[v] = T::load(w + v * T::kLanes);
    NF4_UNROLL
    for (int j = 0; j < kM; ++j) {
      const auto x_n = T::broadcast(x[j] + n);
      NF4_UNROLL
      for (int v = 0; v < kV; ++v) sums[j][v] = T::multiply_add(values[v], x_n, sums[j][v]);
    }
  }
  NF4_UNROLL
  for (int j = 0; j < kM; ++j) {
    float *to = args.sums + (m + j) * args.sums_stride + column;
    NF4_UNROLL
    for (int v = 0; v < kV; ++v, to += T::kSumLanes)
      T::store_sums(to, T::scale_add(sums[j][v], T::broadcast_sum(1), T::load_sums(to)));
  }
}

// Takes kV vectors of columns at a time while there are that many.
template <class T, int kM, int kV>
void outer_columns(const OuterArgs &args, int m, int column, int end) {
  constexpr int kWidth = kV * T::kSumLanes;
  for (; column + kWidth <= end; column += kWidth) outer_block<T, kM, kV>(args, m, column);
  if constexpr (kV > 1)
    if (column < end) outer_columns<T, kM, kV / 2>(args, m, column, end);
}

template <class T, int kM>
void outer_m(const OuterArgs &args, int m, int count, int column) {
  if constexpr (kM > 1)
    if (count < kM) return outer_m<T, kM - 1>(args, m, count, column);
  const int end = args.columns < column + kOuterColumns ? args.columns : column + kOuterColumns;
  outer_columns<T, kM, T::kOuterVectors[kM - 1]>(args, m, column, end);
}

template <class T>
void outer(const OuterArgs &args) {
  for (int column = 0; column < args.columns; column += kOuterColumns)
    for (int m = 0; m < args.m; m += kOuterM)
      outer_m<T, kOuterM>(args, m, args.m - m < kOuterM ? args.m - m : kOuterM, column);
}

}  // namespace nf4::cpu
