// What the kernels that permute columns get. No CUDA types.
#pragma once

#include <cstdint>

#include "cuda/weight/int4_view.hpp"

namespace nf4::cuda {

constexpr int kPermuteThreads = 256;
constexpr int kPermuteColumns = 8;  // of a thread at a time: a vector of 16 bytes
constexpr int kPermuteRowsThreads = 512;
constexpr int kPermuteVectors = 4;  // of a thread of permute_x_rows, at most
// Rows that permute_x_rows has in shared memory: 3, or 1 where 3 do not fit.
constexpr int kPermuteStages[] = {1, 3};

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
  int parts;         // CTAs that have the columns of a row
  int part_vectors;  // of each of them
  int64_t row_step;  // permute_x_rows: from a row of a CTA to its next
};

}  // namespace nf4::cuda
