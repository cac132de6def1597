// What the two ways of matmul have in common.
#pragma once

#include "cpu/backend.hpp"
#include "cpu/kernels.hpp"

namespace nf4::cpu {

// Every code is looked up and multiplied where it lies. For few columns of x, of cols that are
// a multiple of kKernelStep, and for codebooks of ordinary numbers.
void matmul_dot(const MatmulKernels &kernels, const MatmulProblem &problem, RowRange rows);

// Some rows of the weight are dequantized, part by part, and multiplied with all columns.
void matmul_panel(const KernelSet &dense, const MatmulKernels &kernels,
                  const MatmulProblem &problem, RowRange rows);

// Element k of a column of x, which is a row of the matrix in memory.
inline const char *address_of_x(const MatmulProblem &problem, int64_t column, int64_t k) {
  return static_cast<const char *>(problem.x) +
         (column * problem.x_stride + k) * element_bytes(problem.dtype);
}

// Up to a multiple of kKernelStep.
constexpr int64_t to_steps(int64_t elements) {
  return ceil_divide(elements, kKernelStep) * kKernelStep;
}

// Applies a conversion that takes multiples of `step` elements, padding with zeros.
struct PaddedConversion {
  void (*convert)(const void *x, int64_t elements, void *out);
  int64_t step;
  int64_t bytes_in;  // per element
  int64_t bytes_out;

  void operator()(const char *x, int64_t elements, char *out) const;
};

// What of y has been summed up: rows of the weight times columns of x, of which y has the same.
struct Sums {
  RowRange rows;
  RowRange columns;
  const float *values;  // [columns][stride]
  int64_t stride;
};

// Adds the bias and rounds.
void store_sums(const MatmulProblem &problem, const Sums &sums);

}  // namespace nf4::cpu
