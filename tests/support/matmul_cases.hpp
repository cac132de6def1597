// Random matmuls and gradients: a weight, rows of x, and strides.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/cases.hpp"
#include "support/int4_cases.hpp"

namespace nf4::test {

// Host is a HostWeight or a HostInt4Weight. With `gradient`, x is dY and y is dX, and there is no
// bias.
template <class Host>
struct MatmulCaseOf {
  nf4_dtype dtype;
  bool gradient;
  Host weight;
  int64_t m;
  int64_t x_stride;
  int64_t y_stride;
  std::vector<uint8_t> x;     // from the first to the last element; NaN between the rows
  std::vector<uint8_t> bias;  // empty: none

  int64_t x_columns() const { return gradient ? weight.shape.rows : weight.shape.cols; }
  int64_t y_columns() const { return gradient ? weight.shape.cols : weight.shape.rows; }
  // From the first to the last element; 0 if y is empty.
  size_t y_bytes() const;
  nf4_matmul_args args(const void *x_address, const void *bias_address, void *y) const;
};
using MatmulCase = MatmulCaseOf<HostWeight>;

// The numbers in x. kOrdinary: about 1. kOutliers: the same with some of 1e3. kNotFinite: the same
// with NaN and infinities in some rows. kShifted: with a mean of 0.5. kPositive: with a mean of 5.
enum class XKind { kOrdinary, kOutliers, kNotFinite, kShifted, kPositive };

struct MatmulShape {
  int64_t rows, cols, m;
  bool gradient = false;
};

// rows, cols and m are at least 1, cols is often a multiple of 32, and the whole is small enough
// for a naive reference.
MatmulShape random_matmul_shape(Rng &rng);

MatmulCase random_matmul_case(Rng &rng, const CaseClass &kind, CodebookKind codebook,
                              const MatmulShape &shape, XKind x);

// The elements from one row of `cols` to the next, with or without padding. Half of the rows that
// are whole vectors of eight stay so.
int64_t row_stride(Rng &rng, int64_t cols);

// NF4 with scales of about 1, so that errors by norm are meaningful, and rows of x that vectors can
// load: every kernel takes it, if its columns suit the kernel.
MatmulCase plain_matmul_case(Rng &rng, const CaseClass &kind, const MatmulShape &shape);

// Sometimes with scales of every kind, otherwise with ordinary ones.
MatmulCaseOf<HostInt4Weight> random_int4_matmul_case(Rng &rng, const Int4Class &kind,
                                                     const Int4Shape &shape, nf4_dtype dtype,
                                                     int64_t m, XKind x,
                                                     bool ordinary_scales = false);

// Makes every row of x one of its first `distinct` rows, at random, which makes the reference of a
// large case small.
template <class Host>
void repeat_rows(MatmulCaseOf<Host> &test, Rng &rng, int64_t distinct);

std::string describe(const MatmulCase &test, uint64_t stream);
std::string describe(const MatmulCaseOf<HostInt4Weight> &test, uint64_t stream);

// Reads a number of a dtype from memory, and stores the nearest one.
double read_number(nf4_dtype dtype, const void *data, int64_t i);
double round_to(nf4_dtype dtype, double x);

}  // namespace nf4::test
