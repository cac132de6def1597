// The loops of the matmul kernels, for vectors of any instruction set. T is a type of an
// unnamed namespace, so that what is made of these templates stays within the file that is
// compiled for it.
#pragma once

#include <cstdint>

#include "cpu/kernels.hpp"

#if defined(__clang__)
#define NF4_UNROLL _Pragma("clang loop unroll(full)")
#else
#define NF4_UNROLL _Pragma("GCC unroll 16")
#endif

namespace nf4::cpu {

// ---- Prepare -------------------------------------------------------------------------

// A unit of codes is one vector of words, each with the codes of kPieces elements in a row.
// Shifted down piece by piece, its low bits are every kPieces-th element: x is brought into
// that order by taking the vectors of a unit apart into even and odd elements, again and
// again. The first of two codes is in the high nibble, so the pieces come in swapped pairs.
template <class T, class From>
void prepare_units(const void *x, int64_t elements, void *out) {
  constexpr int kPieces = T::kPieces;
  const char *from = static_cast<const char *>(x);
  auto *to = static_cast<typename T::Item *>(out);
  for (int64_t i = 0; i < elements; i += T::kUnit, from += T::kUnit * From::kBytes) {
    typename T::Operand pieces[kPieces];
    NF4_UNROLL
    for (int j = 0; j < kPieces; ++j) pieces[j] = From::load(from + j * T::kLanes * From::kBytes);
    NF4_UNROLL
    for (int step = 1; step < kPieces; step *= 2) {
      typename T::Operand apart[kPieces];
      NF4_UNROLL
      for (int j = 0; j < kPieces; j += 2)
        T::take_apart(pieces[j], pieces[j + 1], apart[j / 2], apart[(j + kPieces) / 2]);
      NF4_UNROLL
      for (int j = 0; j < kPieces; ++j) pieces[j] = apart[j];
    }
    NF4_UNROLL
    for (int j = 0; j < kPieces; ++j, to += T::kLanes) T::store(to, pieces[j ^ 1]);
  }
}

// ---- Dot -----------------------------------------------------------------------------

constexpr int64_t kPrefetchBytes = 4096;

template <class T, int kRows, int kColumns>
void dot_rows(const DotRun &run, int row) {
  using Item = typename T::Item;
  const auto table = T::load_table(run.codebook);
  const auto spread = T::load_spread(run.scales_per_unit);
  const uint8_t *packed = run.packed + row * run.row_bytes;
  const float *scales = run.scales + row * run.scale_stride;
  const Item *x = static_cast<const Item *>(run.x);
  const int64_t next_rows = kRows * run.row_bytes;
  const int64_t ahead = next_rows > kPrefetchBytes ? next_rows : kPrefetchBytes;
  typename T::Sum totals[kRows][kColumns];
  NF4_UNROLL
  for (int r = 0; r < kRows; ++r) {
    NF4_UNROLL
    for (int c = 0; c < kColumns; ++c) totals[r][c] = T::zero();
  }

  for (const Item *end = x + run.elements; x < end; packed += T::kUnit / 2) {
    typename T::Codes codes[kRows];
    typename T::Sum sums[kRows][kColumns];
    NF4_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const uint8_t *from = packed + r * run.row_bytes;
      __builtin_prefetch(from + ahead, 0, 2);
      codes[r] = T::load_codes(from);
    }
    NF4_UNROLL
    for (int j = 0; j < T::kPieces; ++j, x += T::kLanes) {
      typename T::Operand values[kRows];
      NF4_UNROLL
      for (int r = 0; r < kRows; ++r) {
        values[r] = T::look_up(table, codes[r]);
        codes[r] = T::next(codes[r]);
      }
      NF4_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        const auto column = T::load(x + c * run.x_stride);
        NF4_UNROLL
        for (int r = 0; r < kRows; ++r)
          sums[r][c] = j == 0 ? T::multiply(values[r], column)
                              : T::multiply_add(values[r], column, sums[r][c]);
      }
    }
    NF4_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto scale = T::spread_scales(scales + r * run.scale_stride, spread);
      NF4_UNROLL
      for (int c = 0; c < kColumns; ++c)
        totals[r][c] = T::scale_add(sums[r][c], scale, totals[r][c]);
    }
    scales += run.scales_per_unit;
  }
  NF4_UNROLL
  for (int r = 0; r < kRows; ++r) {
    NF4_UNROLL
    for (int c = 0; c < kColumns; ++c)
      run.sums[c * run.sums_stride + row + r] += T::sum_of(totals[r][c]);
  }
}

// kRows at a time while there are so many.
template <class T, int kRows, int kColumns>
void dot_columns(const DotRun &run) {
  int row = 0;
  for (; row + kRows <= run.rows; row += kRows) dot_rows<T, kRows, kColumns>(run, row);
  for (; row < run.rows; ++row) dot_rows<T, 1, kColumns>(run, row);
}

template <class T>
void dot(const DotRun &run) {
  static_assert(kMaxDotColumns == 4, "a case for each");
  switch (run.m) {
    case 1:
      return dot_columns<T, T::kDotRows[0], 1>(run);
    case 2:
      return dot_columns<T, T::kDotRows[1], 2>(run);
    case 3:
      return dot_columns<T, T::kDotRows[2], 3>(run);
    default:
      return dot_columns<T, T::kDotRows[3], 4>(run);
  }
}

// ---- Tile ----------------------------------------------------------------------------

// Four rows of the weight or one.
constexpr int kTileRows = 4;

template <class T, int kRows, int kColumns>
void tile_block(const TileRun &run, int row, int column) {
  using Item = typename T::Item;
  const Item *w = static_cast<const Item *>(run.w) + row * run.w_stride;
  const Item *x = static_cast<const Item *>(run.x) + column * run.x_stride;
  typename T::Sum totals[kRows][kColumns];
  NF4_UNROLL
  for (int r = 0; r < kRows; ++r) {
    NF4_UNROLL
    for (int c = 0; c < kColumns; ++c) totals[r][c] = T::zero();
  }
  for (int64_t k = 0; k < run.elements; k += T::kLanes) {
    typename T::Operand columns[kColumns];
    NF4_UNROLL
    for (int c = 0; c < kColumns; ++c) columns[c] = T::load(x + c * run.x_stride + k);
    NF4_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto values = T::load(w + r * run.w_stride + k);
      NF4_UNROLL
      for (int c = 0; c < kColumns; ++c)
        totals[r][c] = T::multiply_add(values, columns[c], totals[r][c]);
    }
  }
  NF4_UNROLL
  for (int c = 0; c < kColumns; ++c) {
    float *sums = run.sums + (column + c) * run.sums_stride + row;
    if constexpr (kRows == kTileRows)
      T::add_sums(totals[0][c], totals[1][c], totals[2][c], totals[3][c], sums);
    else
      *sums += T::sum_of(totals[0][c]);
  }
}

template <class T, int kColumns>
void tile_columns(const TileRun &run, int column, int columns) {
  if constexpr (kColumns > 1)
    if (columns < kColumns) return tile_columns<T, kColumns - 1>(run, column, columns);
  int row = 0;
  for (; row + kTileRows <= run.rows; row += kTileRows)
    tile_block<T, kTileRows, kColumns>(run, row, column);
  for (; row < run.rows; ++row) tile_block<T, 1, kColumns>(run, row, column);
}

template <class T>
void tile(const TileRun &run) {
  for (int column = 0; column < run.m; column += T::kTileColumns) {
    const int left = run.m - column;
    tile_columns<T, T::kTileColumns>(run, column, left < T::kTileColumns ? left : T::kTileColumns);
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
