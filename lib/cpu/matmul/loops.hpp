// The loops of the matmul kernels, for vectors of any instruction set. T is a type of an unnamed
// namespace, so that instances of these templates stay within the file that is compiled for the
// instruction set.
#pragma once

#include <cstdint>

#include "cpu/isa/unroll.hpp"
#include "cpu/matmul/kernels.hpp"

namespace nf4::cpu {

// ---- Prepare -------------------------------------------------------------------------

// The order for codes that are looked up word by word. A unit of codes is one vector of words, each
// with the codes of kVectors consecutive elements. When it is shifted down nibble by nibble, its
// low bits are every kVectors-th element. Splitting the vectors of a unit into even and odd
// elements, log2(kVectors) times, brings x into that order.
template <class T>
struct ByWords {
  static constexpr int kHighNibble = 1;

  template <class Vectors>
  static void sort(Vectors &vectors) {
    NF4_UNROLL
    for (int step = 1; step < T::kVectors; step *= 2) {
      Vectors halves;
      NF4_UNROLL
      for (int j = 0; j < T::kVectors; j += 2)
        T::split_even_odd(vectors[j], vectors[j + 1], halves[j / 2], halves[(j + T::kVectors) / 2]);
      NF4_UNROLL
      for (int j = 0; j < T::kVectors; ++j) vectors[j] = halves[j];
    }
  }
};

// T::Order sorts the vectors of a unit for codes whose first nibble is the low one. If it is the
// high one, each vector of a low nibble and that of the high nibble, kHighNibble further, change
// places.
template <class T, class From, bool kHighFirst = true>
void prepare_units(const void *x, int64_t elements, void *out) {
  constexpr int kVectors = T::kVectors;
  const char *from = static_cast<const char *>(x);
  auto *to = static_cast<typename T::Item *>(out);
  for (int64_t i = 0; i < elements; i += T::kUnit, from += T::kUnit * From::kBytes) {
    typename T::Operand vectors[kVectors];
    NF4_UNROLL
    for (int j = 0; j < kVectors; ++j) vectors[j] = From::load(from + j * T::kLanes * From::kBytes);
    T::Order::sort(vectors);
    NF4_UNROLL
    for (int j = 0; j < kVectors; ++j, to += T::kLanes)
      T::store(to, vectors[kHighFirst ? j ^ T::Order::kHighNibble : j]);
  }
}

template <class T>
void x_sums(const void *x, int64_t elements, float *sums) {
  const auto *from = static_cast<const typename T::Item *>(x);
  for (int64_t i = 0; i < elements; i += T::kUnit, sums += T::kSumLanes) {
    typename T::Sum sum = T::zero();
    NF4_UNROLL
    for (int j = 0; j < T::kVectors; ++j, from += T::kLanes)
      sum = T::multiply_add(T::one(), T::load(from), sum);
    T::store_sums(sums, sum);
  }
}

// ---- Dot -----------------------------------------------------------------------------

namespace {

// The bytes from some rows to those that are prefetched: whole rows, as x may be a part of a row.
inline int64_t prefetch_distance(int64_t bytes_of_rows) {
  constexpr int64_t kLeast = 8192;
  while (bytes_of_rows < kLeast) bytes_of_rows *= 2;
  return bytes_of_rows;
}

}  // namespace

template <class T, int kN, int kM, bool kZeros>
void dot_block(const DotArgs &args, int n) {
  using Item = typename T::Item;
  const auto table = T::load_table(args.codebook);
  const auto spread = T::load_spread(args.scales_per_unit);
  const uint8_t *packed = args.packed + n * args.row_bytes;
  const float *scales = args.scales + n * args.scale_stride;
  const float *zeros = args.zeros + n * args.scale_stride;
  const float *x_sums = args.x_sums;
  const Item *x = static_cast<const Item *>(args.x);
  const int64_t ahead = prefetch_distance(kN * args.row_bytes);
  typename T::Sum totals[kN][kM];
  NF4_UNROLL
  for (int i = 0; i < kN; ++i) {
    NF4_UNROLL
    for (int m = 0; m < kM; ++m) totals[i][m] = T::zero();
  }

  for (const Item *end = x + args.elements; x < end; packed += T::kUnit / 2) {
    typename T::Codes codes[kN];
    typename T::Sum sums[kN][kM];
    NF4_UNROLL
    for (int i = 0; i < kN; ++i) {
      const uint8_t *from = packed + i * args.row_bytes;
      __builtin_prefetch(from + ahead, 0, 2);
      codes[i] = T::load_codes(from);
    }
    NF4_UNROLL
    for (int j = 0; j < T::kVectors; ++j, x += T::kLanes) {
      typename T::Operand values[kN];
      NF4_UNROLL
      for (int i = 0; i < kN; ++i) {
        values[i] = T::look_up(table, codes[i]);
        codes[i] = T::next(codes[i]);
      }
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) {
        const auto x_m = T::load(x + m * args.x_stride);
        NF4_UNROLL
        for (int i = 0; i < kN; ++i)
          sums[i][m] =
              j == 0 ? T::multiply(values[i], x_m) : T::multiply_add(values[i], x_m, sums[i][m]);
      }
    }
    NF4_UNROLL
    for (int i = 0; i < kN; ++i) {
      if constexpr (kZeros) {
        const auto zero = T::spread_scales(zeros + i * args.scale_stride, spread);
        NF4_UNROLL
        for (int m = 0; m < kM; ++m)
          sums[i][m] =
              T::scale_add(T::load_sums(x_sums + m * args.x_sums_stride), zero, sums[i][m]);
      }
      const auto scale = T::spread_scales(scales + i * args.scale_stride, spread);
      NF4_UNROLL
      for (int m = 0; m < kM; ++m) totals[i][m] = T::scale_add(sums[i][m], scale, totals[i][m]);
    }
    scales += args.scales_per_unit;
    if constexpr (kZeros) {
      zeros += args.scales_per_unit;
      x_sums += T::kSumLanes;
    }
  }
  NF4_UNROLL
  for (int i = 0; i < kN; ++i) {
    NF4_UNROLL
    for (int m = 0; m < kM; ++m) args.sums[m * args.sums_stride + n + i] += T::sum_of(totals[i][m]);
  }
}

// Processes kN rows of the weight at a time while there are that many.
template <class T, bool kZeros, int kN, int kM>
void dot_m(const DotArgs &args) {
  int n = 0;
  for (; n + kN <= args.n; n += kN) dot_block<T, kN, kM, kZeros>(args, n);
  for (; n < args.n; ++n) dot_block<T, 1, kM, kZeros>(args, n);
}

template <class T, bool kZeros = false>
void dot(const DotArgs &args) {
  static_assert(kMaxDotM == 4, "a case for each");
  switch (args.m) {
    case 1:
      return dot_m<T, kZeros, T::kDotN[0], 1>(args);
    case 2:
      return dot_m<T, kZeros, T::kDotN[1], 2>(args);
    case 3:
      return dot_m<T, kZeros, T::kDotN[2], 3>(args);
    default:
      return dot_m<T, kZeros, T::kDotN[3], 4>(args);
  }
}

// ---- Tile ----------------------------------------------------------------------------

// The rows of the weight that are processed together; the last ones are processed one by one.
constexpr int kTileN = 4;

template <class T, int kN, int kM>
void tile_block(const TileArgs &args, int n, int m) {
  using Item = typename T::Item;
  const Item *w = static_cast<const Item *>(args.w) + n * args.w_stride;
  const Item *x = static_cast<const Item *>(args.x) + m * args.x_stride;
  typename T::Sum totals[kN][kM];
  NF4_UNROLL
  for (int i = 0; i < kN; ++i) {
    NF4_UNROLL
    for (int j = 0; j < kM; ++j) totals[i][j] = T::zero();
  }
  for (int64_t k = 0; k < args.elements; k += T::kLanes) {
    typename T::Operand x_rows[kM];
    NF4_UNROLL
    for (int j = 0; j < kM; ++j) x_rows[j] = T::load(x + j * args.x_stride + k);
    NF4_UNROLL
    for (int i = 0; i < kN; ++i) {
      const auto values = T::load(w + i * args.w_stride + k);
      NF4_UNROLL
      for (int j = 0; j < kM; ++j) totals[i][j] = T::multiply_add(values, x_rows[j], totals[i][j]);
    }
  }
  NF4_UNROLL
  for (int j = 0; j < kM; ++j) {
    float *sums = args.sums + (m + j) * args.sums_stride + n;
    if constexpr (kN == kTileN)
      T::add_sums(totals[0][j], totals[1][j], totals[2][j], totals[3][j], sums);
    else
      *sums += T::sum_of(totals[0][j]);
  }
}

template <class T, int kM>
void tile_m(const TileArgs &args, int m, int count) {
  if constexpr (kM > 1)
    if (count < kM) return tile_m<T, kM - 1>(args, m, count);
  int n = 0;
  for (; n + kTileN <= args.n; n += kTileN) tile_block<T, kTileN, kM>(args, n, m);
  for (; n < args.n; ++n) tile_block<T, 1, kM>(args, n, m);
}

template <class T>
void tile(const TileArgs &args) {
  for (int m = 0; m < args.m; m += T::kTileM) {
    const int left = args.m - m;
    tile_m<T, T::kTileM>(args, m, left < T::kTileM ? left : T::kTileM);
  }
}

// Converts x, a vector at a time.
template <class T, class From>
void convert(const void *x, int64_t elements, void *out) {
  const char *from = static_cast<const char *>(x);
  auto *to = static_cast<typename T::Item *>(out);
  for (int64_t i = 0; i < elements; i += T::kLanes)
    T::store(to + i, From::load(from + i * From::kBytes));
}

}  // namespace nf4::cpu
