// The arguments of the kernels that permute columns. No CUDA types.
#pragma once

#include <cstdint>

#include "cuda/weight/int4_view.hpp"

namespace nf4::cuda {

constexpr int kPermuteThreads = 256;
constexpr int kPermuteColumns = 8;  // columns of a thread at a time: a 16-byte vector
constexpr int kPermuteRowsThreads = 512;
constexpr int kPermuteVectors = 4;  // the most that a thread of permute_x_rows has
// The rows that permute_x_rows has in shared memory: 3, or 1 if 3 do not fit.
constexpr int kPermuteStages[] = {1, 3};

// Sorts the columns of a weight by their groups.
struct SortColumnsArgs {
  const int32_t *g_idx;
  int32_t *permutation;
  int64_t cols;
};

struct PermuteCodesArgs {
  Int4View from;
  uint32_t *packed;
  const int32_t *permutation;
  int64_t words;      // in packed
  int64_t row_words;  // per row of packed
};

// Permutes the columns of x into the weight's order: to[m][k] = from[m][permutation[k]], 16 bits
// each.
struct PermuteXArgs {
  const uint16_t *from;
  int64_t from_stride;
  uint16_t *to;  // [m][cols], on a 16-byte boundary
  const int32_t *permutation;
  int64_t m;
  int64_t cols;
  int parts;         // CTAs that share the columns of a row
  int part_vectors;  // vectors of each of them
  int64_t row_step;  // permute_x_rows: from a row of a CTA to its next
};

}  // namespace nf4::cuda
