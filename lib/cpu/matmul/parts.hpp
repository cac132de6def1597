// The ways to multiply (dot, lanes, transposed, pairs, columns, sorted and scattered columns,
// panel), and their shared code.
#pragma once

#include "core/formats.hpp"
#include "cpu/dequant/kernels.hpp"
#include "cpu/dtypes.hpp"
#include "cpu/matmul/dense.hpp"
#include "cpu/matmul/kernels.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

// Looks up each code and multiplies the entry in registers. It is for few rows of x, for cols that
// are a multiple of kKernelStep, and for codebooks of ordinary numbers. bf16_codebook is the
// weight's, for kernels that take it in bf16.
void matmul_dot(const MatmulKernels &kernels, const MatmulProblem &problem,
                const RoundedCodebook &bf16_codebook, RowRange n, RowRange m);

// The same with a lane for each row of the weight, for more rows of x in bf16.
void matmul_lanes(const MatmulKernels &kernels, const MatmulProblem &problem,
                  const RoundedCodebook &bf16_codebook, RowRange n);

// The same with a lane for each row of x, for more rows of x in fp32.
void matmul_transposed(const MatmulKernels &kernels, const MatmulProblem &problem,
                       const RoundedCodebook &bf16_codebook, RowRange n, RowRange m);

// The rows of x that transposed multiplies at once.
constexpr int64_t kSliceM = 16;

// The same in integers, with a lane for each row of the weight, for up to kMaxPairsM rows of x in
// bf16. Returns false, and stores nothing, if integers do not suit the codebook or these rows of x.
bool matmul_pairs(const MatmulKernels &kernels, const MatmulProblem &problem,
                  const RoundedCodebook &bf16_codebook, RowRange n, RowRange m);

// The rows of x that pairs multiplies at once.
constexpr int64_t kMaxPairsM = 64;

// For integer weights whose codes lie along the columns, in groups of whole steps.
void matmul_dot(const DequantKernels &dequant, const MatmulKernels &kernels,
                const Int4MatmulProblem &problem, RowRange n, RowRange m);
void matmul_lanes(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const Int4MatmulProblem &problem, RowRange n);
void matmul_transposed(const DequantKernels &dequant, const MatmulKernels &kernels,
                       const Int4MatmulProblem &problem, RowRange n, RowRange m);
bool matmul_pairs(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const Int4MatmulProblem &problem, RowRange n, RowRange m);

// For integer weights in words of GPTQ or AWQ, in groups of whole multiples of 32 columns, or one.
bool matmul_word_pairs(const DequantKernels &dequant, const MatmulKernels &kernels,
                       const Int4MatmulProblem &problem, RowRange n, RowRange m);

// For integer weights in words of GPTQ or AWQ, in groups of whole words.
void matmul_columns(const DequantKernels &dequant, const MatmulKernels &kernels,
                    const Int4MatmulProblem &problem, RowRange n);

// For integer weights whose groups g_idx scatters, or which have rows of codes in groups that are
// not whole steps.
void matmul_sorted_columns(const DequantKernels &dequant, const MatmulKernels &kernels,
                           const Int4MatmulProblem &problem, RowRange n);

// For very few rows of x, with integer weights that g_idx scatters over some groups.
bool suits_scattered_columns(const Int4MatmulProblem &problem);
void matmul_scattered_columns(const DequantKernels &dequant, const MatmulKernels &kernels,
                              const Int4MatmulProblem &problem, RowRange n);

// The codes of integer weights minus 8, in fp32 or bf16, which holds them exactly, too.
const void *int4_codebook(int dtype);

// A weight's codebook in bf16: the format's own, or a caller's, rounded or found among those
// rounded recently.
RoundedCodebook codebook_in_bf16(const Weight &weight);

// Numbers of bf16 as integers.
SplitCodebook split_codebook(const uint16_t *bf16_entries);

// Dequantizes a panel of some rows of the weight, part by part, and multiplies it with all rows of
// x.
void matmul_panel(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const MatmulProblem &problem, RowRange n);
void matmul_panel(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const Int4MatmulProblem &problem, RowRange n);
void matmul_panel(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const DenseProblem &problem, RowRange n);

// Multiplies x with a matrix along its rows: y = x W, for a few columns.
void dense_outer(const MatmulKernels &kernels, const DenseProblem &problem);

// The address of x[m, k].
template <class Problem>
const char *address_of_x(const Problem &problem, int64_t m, int64_t k) {
  return static_cast<const char *>(problem.x) +
         (problem.group->row_of_x(m) * problem.x_stride + k) * element_bytes(problem.dtype);
}

// The column of x with which each stored column of the weight is multiplied; NULL: the same.
inline const int32_t *column_order(const Weight &) { return nullptr; }
inline const int32_t *column_order(const Int4Weight &weight) { return weight.permutation; }

// Tells whether the rows of x lie in memory as the kernels take them.
template <class Problem>
bool has_plain_x(const Problem &problem) {
  return column_order(problem.weight) == nullptr && problem.group->x_index == nullptr;
}

// Returns row m of x from stored column k on: in place, or gathered in `buffer`.
template <class Problem>
const char *part_of_x(const Problem &problem, int64_t m, int64_t k, int64_t elements,
                      char *buffer) {
  const int32_t *order = column_order(problem.weight);
  if (order == nullptr) return address_of_x(problem, m, k);
  const char *row = address_of_x(problem, m, 0);
  with_dtype(problem.dtype, [&](auto type) {
    const auto *from = reinterpret_cast<const decltype(type) *>(row);
    auto *to = reinterpret_cast<decltype(type) *>(buffer);
    for (int64_t i = 0; i < elements; ++i) to[i] = from[order[k + i]];
  });
  return buffer;
}

// Applies a conversion that takes multiples of `step` elements, padding with zeros.
struct PaddedConversion {
  void (*convert)(const void *x, int64_t elements, void *out);
  int64_t step;
  int64_t bytes_in;  // per element
  int64_t bytes_out;

  void operator()(const char *x, int64_t elements, char *out) const;
};

// The sums of a part of y.
struct Sums {
  RowRange n;     // rows of the weight
  RowRange m;     // rows of x
  float *values;  // [m][stride]
  int64_t stride;
};

// Adds the adapter's term to the sums, if there is an adapter.
void add_adapter(const MatmulKernels &kernels, const MatmulProblem &problem, const Sums &sums);
template <class Problem>
void add_adapter(const MatmulKernels &, const Problem &, const Sums &) {}

// Adds the bias, multiplies with the scale of the row, and rounds.
template <class Problem>
void store_sums(const Problem &problem, const Sums &sums);

}  // namespace nf4::cpu
