// Validated requests, which the API passes to the backends. There are no CUDA types here. Only one
// check is left to the backends: whether a GPU can reach the memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nf4/nf4.h"

namespace nf4 {

enum class ScaleBytes : uint8_t;  // core/scale_bytes.hpp

constexpr int element_bytes(nf4_dtype dtype) { return dtype == NF4_DTYPE_FP32 ? 4 : 2; }

struct Weight {
  nf4_format format;
  ScaleBytes scale_bytes;  // kNone unless MXFP4 or NVFP4
  int32_t scale_rule;
  int64_t rows;
  int64_t cols;
  int64_t elements;
  int64_t blocks;
  int64_t nested_blocks;  // elements of nested_absmax
  int64_t global_blocks;  // blocks that share a global scale; 0 unless NVFP4
  int blocksize_log2;
  int nested_blocksize_log2;  // -1 unless nested
  uint8_t *packed;
  void *absmax;  // float if flat, else uint8_t
  float *nested_absmax;
  const float *nested_code;
  float *nested_offset;
  const float *codebook;  // NULL: the format's own codebook

  bool nested() const { return nested_blocksize_log2 >= 0; }
  constexpr bool has_scale_bytes() const { return scale_bytes != ScaleBytes{}; }
  bool low_nibble_first() const { return has_scale_bytes(); }
  bool global_divides() const { return scale_rule == NF4_GLOBAL_DIVISOR; }
  int scale_size() const { return nested() || has_scale_bytes() ? 1 : 4; }
  int64_t blocksize() const { return int64_t{1} << blocksize_log2; }
  int64_t nested_blocksize() const { return int64_t{1} << nested_blocksize_log2; }
};

// A weight of 4-bit integers in groups of columns (core/int4.hpp says where its parts lie).
struct Int4Weight {
  nf4_int4_layout layout;
  nf4_dtype scales_dtype;
  uint32_t zero_offset;
  int64_t rows;
  int64_t cols;
  int64_t elements;
  int64_t group_size;  // in columns; cols if there is one group
  int64_t groups;
  uint32_t *packed;
  void *scales;
  uint32_t *zeros;             // NULL: each zero is kInt4SymmetricZero
  const int32_t *g_idx;        // NULL: column / group_size
  const int32_t *permutation;  // NULL: the identity
};

// A buffer of a request, in the form that the checks common to all requests use.
struct Operand {
  const char *name;
  const void *address;
  int64_t bytes;
  int alignment;
  bool written;
};

constexpr int kMaxOperands = 13;

struct Operands {
  Operand list[kMaxOperands];
  int count = 0;

  void add(const char *name, const void *address, int64_t bytes, int alignment, bool written) {
    list[count++] = {name, address, bytes, alignment, written};
  }
  const Operand *begin() const { return list; }
  const Operand *end() const { return list + count; }
};

template <class W>
struct DequantProblemOf {
  W weight;
  void *out;
  nf4_dtype dtype;
  Operands operands;
};
using DequantProblem = DequantProblemOf<Weight>;
using Int4DequantProblem = DequantProblemOf<Int4Weight>;

struct QuantizeProblem {
  Weight weight;
  const void *in;
  nf4_dtype dtype;
  void *workspace;
  Operands operands;
};

struct Int4QuantizeProblem {
  Int4Weight weight;
  const void *in;
  nf4_dtype dtype;
  bool symmetric;
  Operands operands;
};

// Sorts the columns of a weight with g_idx by their groups.
struct Int4ReorderProblem {
  Int4Weight from;
  uint32_t *packed;
  int32_t *permutation;
  Operands operands;
};

// The most rows of x that a GPU multiplies in fp32.
constexpr int kFp32RowsOfX = 16;

constexpr int kMaxLoraRank = 128;

// The adapter of a product. A weight without elements has none.
struct Lora {
  int rank = 0;     // 0: no adapter
  nf4_dtype dtype;  // dtype of a and b: the problem's, or fp32
  float scale;
  const void *a;  // [rank][cols]
  int64_t a_stride;
  const void *b;  // [rows][rank]
  int64_t b_stride;
  void *product;  // [m][rank], in the problem's dtype; NULL: not wanted, only on a GPU
};

// One gradient of an adapter: element (r, c) is the scaled sum over m of left[m][r] right[m][c].
struct LoraGrad {
  const void *left;   // q for dA, p for dB: [m][rank]
  const void *right;  // x for dA, dY for dB: [m][columns]
  int64_t right_stride;
  int64_t columns;  // 0: not wanted
  void *out;
  int64_t out_stride;
};

struct LoraGradProblem {
  nf4_dtype dtype;
  nf4_dtype grad_dtype;  // dtype of the outputs: `dtype`, or fp32
  int rank;
  float scale;
  int64_t m;
  LoraGrad a;  // out is [rank][columns]
  LoraGrad b;  // out is [columns][rank]
  Operands operands;

  bool empty() const { return a.columns == 0 && b.columns == 0; }
};

// Integer weights have no adapters.
template <class W>
struct Adapter {
  Lora lora{};
};
template <>
struct Adapter<Int4Weight> {
  static constexpr Lora lora{};
};

// The expert to which the rows of y belong. Only CPU backends use it.
struct Group {
  int64_t first_row = 0;  // the expert's first row in the weight; only the gradient reads it
  const int32_t *x_index = nullptr;  // NULL: row m of x for row m of y
  int64_t x_rows = 0;                // with x_index, at least 1
  const float *row_scale = nullptr;  // NULL: 1

  bool has_x(int64_t m) const {
    return x_index == nullptr || (x_index[m] >= 0 && x_index[m] < x_rows);
  }
  // Returns the row of x for row m of y. If there is none, any row may be read in its place.
  int64_t row_of_x(int64_t m) const { return x_index == nullptr ? m : has_x(m) ? x_index[m] : 0; }
};

inline constexpr Group kNoGroup{};

// y = x W^T + bias, or the gradient, y = x W, without a bias.
template <class W>
struct MatmulProblemOf : Adapter<W> {
  W weight;
  const Group *group = &kNoGroup;
  nf4_dtype dtype;
  bool gradient = false;
  int64_t m;
  const void *x;
  int64_t x_stride;
  const void *bias;  // or NULL
  void *y;
  int64_t y_stride;
  void *workspace;  // NULL on the CPU
  Operands operands;

  int64_t x_columns() const { return gradient ? weight.rows : weight.cols; }
  int64_t y_columns() const { return gradient ? weight.cols : weight.rows; }
  bool empty() const { return m == 0 || y_columns() == 0; }
};
using MatmulProblem = MatmulProblemOf<Weight>;
using Int4MatmulProblem = MatmulProblemOf<Int4Weight>;

// The matmuls ("products") of one call, each checked alone and against the others. Some may be
// empty.
template <class W>
struct MatmulBatchOf {
  MatmulProblemOf<W> list[NF4_MATMUL_BATCH_MAX];
  int count = 0;

  const MatmulProblemOf<W> *begin() const { return list; }
  const MatmulProblemOf<W> *end() const { return list + count; }
  bool empty() const {
    for (const MatmulProblemOf<W> &problem : *this)
      if (!problem.empty()) return false;
    return true;
  }
};
using MatmulBatch = MatmulBatchOf<Weight>;
using Int4MatmulBatch = MatmulBatchOf<Int4Weight>;

// The weight of a grouped problem is a stack of codes, or the first expert's integers.
inline int64_t rows_of_expert(const Weight &weight, int32_t experts) {
  return experts == 0 ? 0 : weight.rows / experts;
}
inline int64_t rows_of_expert(const Int4Weight &weight, int32_t) { return weight.rows; }

// Products of experts, or their gradient; nf4_grouped_args describes them.
template <class W>
struct GroupedProblemOf {
  bool gradient = false;
  W weight;
  nf4_dtype dtype;
  int32_t experts;
  int64_t m;
  const void *x;
  int64_t x_stride;
  int64_t x_rows;
  void *y;
  int64_t y_stride;
  const int32_t *ends;
  const int32_t *x_index;  // or NULL
  const void *bias;        // or NULL
  int64_t bias_stride;
  const float *row_scale;  // or NULL
  void *workspace;         // NULL on the CPU
  Operands operands;

  int64_t expert_rows() const { return rows_of_expert(weight, experts); }
  int64_t x_columns() const { return gradient ? expert_rows() : weight.cols; }
  int64_t y_columns() const { return gradient ? weight.cols : expert_rows(); }
  bool empty() const { return m == 0 || experts == 0 || y_columns() == 0; }
};
using GroupedProblem = GroupedProblemOf<Weight>;
using Int4GroupedProblem = GroupedProblemOf<Int4Weight>;

inline bool is_multiple(const void *address, int alignment) {
  return reinterpret_cast<uintptr_t>(address) % alignment == 0;
}

constexpr int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The workspace of nested quantize. It holds the scales in fp32, then the partial sums of their
// mean, level by level: the first level has a sum for every kElementsPerPartialSum elements, and
// each further level has a sum for every kSumsPerSum sums, until one is left.
constexpr int64_t kElementsPerPartialSum = 4096;
constexpr int64_t kSumsPerSum = 4096;

struct QuantizeWorkspace {
  int64_t scales_bytes = 0;
  int64_t partial_sums = 0;

  explicit QuantizeWorkspace(const Weight &weight) {
    if (!weight.nested() || weight.elements == 0) return;
    scales_bytes = ceil_divide(weight.blocks * 4, 16) * 16;
    int64_t sums = ceil_divide(weight.elements, kElementsPerPartialSum);
    for (partial_sums = sums; sums > 1; partial_sums += sums) sums = ceil_divide(sums, kSumsPerSum);
  }
  int64_t bytes() const { return scales_bytes + partial_sums * 8; }
};

}  // namespace nf4
