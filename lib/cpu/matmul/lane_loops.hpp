// The kernels of lanes (lanes.cpp): a lane is a row of the weight, and x is broadcast. T is as in
// loops.hpp. 32 weights and a row of x take a vdpbf16ps whose x comes from the L1 cache; kM rows of
// x share a shift and a look-up. docs/design/cpu.md has the rates.
#pragma once

#include <cstdint>

#include "cpu/isa/unroll.hpp"
#include "cpu/matmul/kernels.hpp"

namespace nf4::cpu {

// Converts whole steps of x: 8 columns, and the next 8 `stride` elements from there.
template <class T>
void pair_for_lanes(const void *x, int64_t elements, bool high_first, void *out, int64_t stride) {
  const auto *from = static_cast<const typename T::Item *>(x);
  auto *to = static_cast<typename T::Item *>(out);
  for (int64_t i = 0; i < elements; i += T::kLanes, to += T::kLanes / kCodesPerWord * stride) {
    const auto vector = T::load(from + i);
    T::store_eights(to, stride, high_first ? T::pair_high_first(vector) : T::pair(vector));
  }
}

// Prefetches the next codes, line by line: enough for each 8 columns that this many rows are all
// prefetched.
template <int kRows>
class NextCodes {
 public:
  NextCodes(const LanesArgs &args, int first)
      : row_(args.next == nullptr ? nullptr : args.next + first * args.row_bytes),
        row_bytes_(args.row_bytes),
        bytes_(args.elements / 2) {}

  void prefetch() {
    if (row_ == nullptr) return;
    NF4_UNROLL
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(row_ + at_ + i * kLine, 0, 2);
    at_ += kLines * kLine;
    if (at_ < bytes_) return;
    at_ = 0;
    row_ += row_bytes_;
  }

 private:
  static constexpr int kLine = 64, kLines = kRows * kCodesPerWord / 2 / kLine;

  const uint8_t *row_;
  const int64_t row_bytes_;
  const int64_t bytes_;  // per row
  int64_t at_ = 0;
};

// The registers of sums: kVectors of rows times kM.
template <class T, int kVectors, int kM, bool kZeros>
void lanes_block(const LanesArgs &args, int first) {
  using Item = typename T::Item;
  constexpr int kItems = T::kLanes / T::kSumLanes;  // in a lane
  const auto table = T::load_table(args.codebook);
  const uint32_t *codes_at = args.codes + first;
  const float *scales_at = args.scales + first;
  const float *zeros_at = kZeros ? args.zeros + first : nullptr;
  const float *x_sums = args.x_sums;
  const Item *x = static_cast<const Item *>(args.x);
  NextCodes<kVectors * T::kSumLanes> next(args, first);
  for (const Item *const end = x + args.elements * kM; x < end; scales_at += kLaneBlockN) {
    typename T::Sum sums[kVectors][kM];
    NF4_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) sums[v][m] = T::zero();
    }
    for (int64_t k = 0; k < args.per_scale; k += kCodesPerWord) {
      next.prefetch();
      typename T::Codes codes[kVectors];
      NF4_UNROLL
      for (int v = 0; v < kVectors; ++v)
        codes[v] = T::load_codes(reinterpret_cast<const uint8_t *>(codes_at + v * T::kSumLanes));
      NF4_UNROLL
      for (int i = 0; i < kCodesPerWord; i += kItems) {
        typename T::Operand values[kVectors];
        NF4_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          values[v] = T::look_up(table, codes[v]);
          codes[v] = T::next(codes[v]);
        }
        NF4_UNROLL
        for (int m = 0; m < kM; ++m) {
          const auto x_m = T::broadcast(x + m * kCodesPerWord + i);
          NF4_UNROLL
          for (int v = 0; v < kVectors; ++v)
            sums[v][m] = T::multiply_add(values[v], x_m, sums[v][m]);
        }
      }
      codes_at += kLaneBlockN;
      x += kM * kCodesPerWord;
    }
    NF4_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const auto scale = T::load_sums(scales_at + v * T::kSumLanes);
      typename T::Sum zero;
      if constexpr (kZeros) zero = T::load_sums(zeros_at + v * T::kSumLanes);
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) {
        if constexpr (kZeros)
          sums[v][m] =
              T::scale_add(zero, T::broadcast_sum(x_sums[m * args.x_sums_stride]), sums[v][m]);
        float *to = args.sums + m * args.sums_stride + first + v * T::kSumLanes;
        T::store_sums(to, T::scale_add(sums[v][m], scale, T::load_sums(to)));
      }
    }
    if constexpr (kZeros) {
      zeros_at += kLaneBlockN;
      ++x_sums;
    }
  }
}

template <class T, bool kZeros, int kM>
void lanes_m(const LanesArgs &args) {
  if constexpr (kM > 1)
    if (args.m < kM) return lanes_m<T, kZeros, kM - 1>(args);
  constexpr int kVectors = 2;
  int n = 0;
  for (; n + kVectors * T::kSumLanes <= args.n; n += kVectors * T::kSumLanes)
    lanes_block<T, kVectors, kM, kZeros>(args, n);
  for (; n < args.n; n += T::kSumLanes) lanes_block<T, 1, kM, kZeros>(args, n);
}

template <class T>
void lanes(const LanesArgs &args) {
  if (args.zeros == nullptr) return lanes_m<T, false, kMaxLaneM>(args);
  lanes_m<T, true, kMaxLaneM>(args);
}

}  // namespace nf4::cpu
