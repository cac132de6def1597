// The checks that all kinds of weights and all operations share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nf4/nf4.h"
#include "problem.hpp"
#include "validate.hpp"

namespace nf4 {

// Keeps the byte counts of a tensor, and sums of a few of them, well below the limit of int64.
constexpr int64_t kMaxElements = int64_t{1} << 60;

nf4_status invalid(const char *name, int64_t value, const char *expected);

// Checks the struct_size of a caller's non-null struct named `type`.
nf4_status validate_struct_size(const char *type, size_t given, size_t known);

nf4_status validate_dtype(const char *name, nf4_dtype dtype);

nf4_status validate_rows_cols(int64_t rows, int64_t cols);

// A matrix in the caller's args. Its stride must hold a whole row, and its extent must not exceed
// kMaxElements.
struct Matrix {
  const char *name;
  int64_t stride, rows, columns;
  const char *rows_name;
};
nf4_status validate_stride(const Matrix &matrix);

// The bytes from the first element of a matrix to its last.
inline int64_t matrix_bytes(nf4_dtype dtype, int64_t rows, int64_t stride, int64_t columns) {
  return ((rows - 1) * stride + columns) * element_bytes(dtype);
}

// Checks that no operand is NULL or misaligned, and that no output overlaps another operand.
nf4_status validate_operands(const Operands &operands);

// The addresses of an operand. An operand that would go beyond the end of all addresses ends there.
struct Extent {
  uintptr_t begin, end;
};
Extent extent(const Operand &operand);
bool overlap(const Operand &a, const Operand &b);

// These exist for each kind of weight (validate.cpp, validate_int4.cpp). The shape of the weight is
// set. Its pointers are copied, for a launch and for a plan or a path alike: a choice depends on
// them. Without elements they stay NULL: the caller may have left anything there, and nothing is
// read.
void copy_pointers(const nf4_tensor &tensor, Weight &weight);
void copy_pointers(const nf4_int4_tensor &tensor, Int4Weight &weight);
// A launch needs pointers that agree with the other fields, if there are elements.
nf4_status validate_pointers(const nf4_tensor &tensor);
nf4_status validate_pointers(const nf4_int4_tensor &tensor);
template <class Tensor, class W>
nf4_status validate_weight(const Tensor *tensor, W &weight) {
  if (const nf4_status status = validate_shape(tensor, weight)) return status;
  copy_pointers(*tensor, weight);
  return validate_pointers(*tensor);
}
void add_weight(Operands &operands, const Weight &weight, bool written);
void add_weight(Operands &operands, const Int4Weight &weight, bool written);

}  // namespace nf4
