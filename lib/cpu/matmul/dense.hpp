// Matrices that are not quantized, in the form that the kernels take: those of an adapter, and dy.
#pragma once

#include "cpu/matmul/kernels.hpp"
#include "problem.hpp"

namespace nf4::cpu {

struct DenseMatrix {
  int64_t rows, cols;
  nf4_dtype dtype;
  const void *data;
  int64_t stride;
  float scale = 1;
  const Group *order = nullptr;  // NULL: row m for row m of y
  int64_t step = 1;              // from one column to the next

  const char *address(int64_t row, int64_t col) const {
    const int64_t at = (order == nullptr ? row : order->row_of_x(row)) * stride + col * step;
    return static_cast<const char *>(data) + at * element_bytes(dtype);
  }
  // Reads `elements` of a row from `col` on, times the scale, in the kernels' dtype, and pads with
  // zeros up to a whole kKernelStep.
  void read(const MatmulKernels &kernels, int64_t row, int64_t col, int64_t elements,
            char *out) const;
};

inline const int32_t *column_order(const DenseMatrix &) { return nullptr; }

using DenseProblem = MatmulProblemOf<DenseMatrix>;

// Some rows of an adapter's product, as a problem. The product is its y; its x is the x of
// `problem`.
inline DenseProblem adapter_problem(const MatmulProblem &problem, const DenseMatrix &matrix,
                                    int64_t first_m, int64_t m) {
  const int64_t item = element_bytes(problem.dtype);
  DenseProblem adapter{};
  adapter.weight = matrix;
  adapter.dtype = problem.dtype;
  adapter.m = m;
  adapter.x = static_cast<const char *>(problem.x) + first_m * problem.x_stride * item;
  adapter.x_stride = problem.x_stride;
  adapter.y = static_cast<char *>(problem.lora.product) + first_m * problem.lora.rank * item;
  adapter.y_stride = problem.lora.rank;
  return adapter;
}

}  // namespace nf4::cpu
