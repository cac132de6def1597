// What the kernels that permute columns get. No CUDA types.
#pragma once

#include <cstdint>

#include "cuda/weight/int4_view.hpp"

namespace nf4::cuda {

constexpr int kPermuteThreads = 256;
constexpr int kPermuteRowsThreads = 512;
constexpr int kPermuteRows = 4;  // of x that a CTA has
// CTAs of few rows that may start while the predecessor ends: more would presumably crowd the
// multiprocessors that it leaves free.
constexpr int kPermutePdlCtas = 16;

// The columns of a weight in the order of their groups.
struct SortColumnsArgs {
  const int32_t *g_idx;
  int32_t *permutation;
  int64_t cols;
};

struct PermuteCodesArgs {
  Int4View from;
  uint32_t *packed;
  const int32_t *permutation;
  int64_t words;      // of packed
  int64_t row_words;  // of a row of packed
};

// x with its columns in the order of the weight's: to[m][k] = from[m][permutation[k]], 16 bits
// each.
struct PermuteXArgs {
  const uint16_t *from;
  int64_t from_stride;
  uint16_t *to;  // [m][cols], on a 16-byte boundary
  const int32_t *permutation;
  int64_t m;
  int64_t cols;
  int row_ctas;  // that have the columns of a row, of few rows
};

}  // namespace nf4::cuda
