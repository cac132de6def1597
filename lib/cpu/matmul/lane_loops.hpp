// The kernels of lanes (lanes.cpp): a lane is a row of the weight, and x is broadcast. T as in
// loops.hpp. For 32 weights and a row of x: a vdpbf16ps whose x comes from the L1 cache; a shift
// and a look-up are shared by kM rows of x. docs/design/cpu.md has the rates.
#pragma once

#include <cstdint>

#include "cpu/isa/unroll.hpp"
#include "cpu/matmul/kernels.hpp"

namespace nf4::cpu {

// Two lines of the next codes, of four such of a row: a step for each 8 columns of 32 rows.
template <class T>
void prefetch_lines(const LanesArgs &args, int first, int64_t step) {
  if (args.next == nullptr) return;
  const uint8_t *row = args.next + (first + step / 4) * args.row_bytes;
  __builtin_prefetch(row + step % 4 * 128, 0, 2);
  __builtin_prefetch(row + step % 4 * 128 + 64, 0, 2);
}

// The registers of sums: kVectors of rows times kM.
template <class T, int kVectors, int kM>
void lanes_block(const LanesArgs &args, int first) {
  using Item = typename T::Item;
  constexpr int kItems = T::kLanes / T::kSumLanes;  // of a lane
  const auto table = T::load_table(args.codebook);
  const uint32_t *codes_at = args.codes + first;
  const float *scales_at = args.scales + first;
  const Item *x = static_cast<const Item *>(args.x);
  int64_t step = 0;
  for (const Item *const end = x + args.elements; x < end; scales_at += kLaneBlockN) {
    typename T::Sum sums[kVectors][kM];
    NF4_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) sums[v][m] = T::zero();
    }
    for (int64_t k = 0; k < args.per_scale; k += kCodesPerWord, codes_at += kLaneBlockN) {
      prefetch_lines<T>(args, first, step++);
      typename T::Codes codes[kVectors];
      NF4_UNROLL
      for (int v = 0; v < kVectors; ++v)
        codes[v] = T::load_codes(reinterpret_cast<const uint8_t *>(codes_at + v * T::kSumLanes));
      NF4_UNROLL
      for (int i = 0; i < kCodesPerWord; i += kItems, x += kItems) {
        typename T::Operand values[kVectors];
        NF4_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          values[v] = T::look_up(table, codes[v]);
          codes[v] = T::next(codes[v]);
        }
        NF4_UNROLL
        for (int m = 0; m < kM; ++m) {
          const auto x_m = T::broadcast(x + m * kLaneColumns);
          NF4_UNROLL
          for (int v = 0; v < kVectors; ++v)
            sums[v][m] = T::multiply_add(values[v], x_m, sums[v][m]);
        }
      }
    }
    NF4_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const auto scale = T::load_sums(scales_at + v * T::kSumLanes);
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) {
        float *to = args.sums + m * kLaneBlockN + first + v * T::kSumLanes;
        T::store_sums(to, T::scale_add(sums[v][m], scale, T::load_sums(to)));
      }
    }
  }
}

template <class T, int kM>
void lanes_m(const LanesArgs &args) {
  if constexpr (kM > 1)
    if (args.m < kM) return lanes_m<T, kM - 1>(args);
  constexpr int kVectors = 2;
  int n = 0;
  for (; n + kVectors * T::kSumLanes <= args.n; n += kVectors * T::kSumLanes)
    lanes_block<T, kVectors, kM>(args, n);
  for (; n < args.n; n += T::kSumLanes) lanes_block<T, 1, kM>(args, n);
}

template <class T>
void lanes(const LanesArgs &args) {
  lanes_m<T, kMaxLaneM>(args);
}

}  // namespace nf4::cpu
