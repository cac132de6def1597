// The kernel of scattered columns (scattered_columns.cpp): words of GPTQ times x, where each column
// has a group. T is as in loops.hpp. 16 products take a load and a store of sums in the L1 cache.
#pragma once

#include <cstdint>

#include "cpu/isa/unroll.hpp"
#include "cpu/matmul/kernels.hpp"

namespace nf4::cpu {

// Multiplies vectors of rows from row n on. There are at least `lanes` rows, or kVectors is 1.
template <class T, int kVectors, int kM>
void scattered_block(const ScatteredArgs &args, const uint32_t *words, int64_t k, int64_t n,
                     int64_t lanes) {
  using Item = typename T::Item;
  constexpr int kItems = T::kLanes / T::kSumLanes;  // in a lane
  const auto table = T::load_table(args.codebook);
  const Item *x = static_cast<const Item *>(args.x) + k * kItems;
  typename T::Codes codes[kVectors];
  NF4_UNROLL
  for (int v = 0; v < kVectors; ++v)
    codes[v] = T::load_words(words + n + v * T::kSumLanes, kVectors == 1 ? lanes : T::kSumLanes);
  NF4_UNROLL
  for (int i = 0; i < 8 / kItems; ++i) {
    typename T::Operand values[kVectors];
    NF4_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      values[v] = T::look_up(table, codes[v]);
      codes[v] = T::next(codes[v]);
    }
    // Selects the column in each item of a lane: x of the other columns is zero.
    NF4_UNROLL
    for (int item = 0; item < kItems; ++item) {
      const int column = i + item * (8 / kItems);
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) {
        float *sums =
            args.sums + m * args.sums_stride + args.groups[k + column] * args.group_stride + n;
        const auto x_m =
            T::broadcast(x + m * args.x_stride + column * kItems + (kItems - 1 - item));
        NF4_UNROLL
        for (int v = 0; v < kVectors; ++v, sums += T::kSumLanes)
          T::store_sums(sums, T::multiply_add(values[v], x_m, T::load_sums(sums)));
      }
    }
  }
}

template <class T, int kM>
void scattered_m(const ScatteredArgs &args) {
  if constexpr (kM > 1)
    if (args.m < kM) return scattered_m<T, kM - 1>(args);
  constexpr int kVectors = 4;
  constexpr int64_t kRows = kVectors * T::kSumLanes;
  const uint32_t *words = args.words, *next = args.next.words;
  for (int64_t k = 0; k < args.cols; k += 8, words += args.stride, next += args.next.stride) {
    for (int64_t n = 0; n < args.rows; n += T::kSumLanes)
      __builtin_prefetch(next + n / T::kSumLanes * args.next.step, 0, 2);
    int64_t n = 0;
    for (; n + kRows <= args.rows; n += kRows)
      scattered_block<T, kVectors, kM>(args, words, k, n, kRows);
    for (; n < args.rows; n += T::kSumLanes)
      scattered_block<T, 1, kM>(args, words, k, n, args.rows - n);
  }
}

template <class T>
void scattered_columns(const ScatteredArgs &args) {
  scattered_m<T, kMaxScatteredM>(args);
}

}  // namespace nf4::cpu
