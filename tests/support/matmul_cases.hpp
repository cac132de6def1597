// Random matmuls and gradients: a weight, rows of x, and strides.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/cases.hpp"
#include "support/int4_cases.hpp"

namespace nf4::test {

// A HostWeight or HostInt4Weight.
// gradient: x is dY and y is dX; there is no bias.
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
  // From the first to the last element; 0 where y is empty.
  size_t y_bytes() const;
  nf4_matmul_args args(const void *x_address, const void *bias_address, void *y) const;
};
using MatmulCase = MatmulCaseOf<HostWeight>;
using Int4MatmulCase = MatmulCaseOf<HostInt4Weight>;

// What x holds: numbers of about 1; the same with some of 1e3; the same with NaN and infinities
// in some of its rows; numbers of the mean 0.5; of the mean 5.
enum class XKind { kOrdinary, kOutliers, kNotFinite, kShifted, kPositive };

struct MatmulShape {
  int64_t rows, cols, m;
  bool gradient = false;
};

// rows, cols and m from 1 up, cols often a multiple of 32, the whole small enough for a
// naive reference.
MatmulShape random_matmul_shape(Rng &rng);

MatmulCase random_matmul_case(Rng &rng, const CaseClass &kind, CodebookKind codebook,
                              const MatmulShape &shape, XKind x);

// Elements from one row of `cols` to the next, with padding or without: of rows of whole vectors of
// eight, half keep them so.
int64_t row_stride(Rng &rng, int64_t cols);

// NF4 with scales of about 1, so that errors by norm mean something, and rows of x that vectors
// can load: what every kernel takes, where its columns suit it.
MatmulCase plain_matmul_case(Rng &rng, const CaseClass &kind, const MatmulShape &shape);

// With scales of every kind now and then, or with ordinary ones.
Int4MatmulCase random_int4_matmul_case(Rng &rng, const Int4Class &kind, const Int4Shape &shape,
                                       nf4_dtype dtype, int64_t m, XKind x,
                                       bool ordinary_scales = false);

// Makes every row of x one of its first `distinct`, at random, which makes a large case's reference
// small.
template <class Host>
void repeat_rows(MatmulCaseOf<Host> &test, Rng &rng, int64_t distinct);

std::string describe(const MatmulCase &test, uint64_t stream);
std::string describe(const Int4MatmulCase &test, uint64_t stream);

// A number of a dtype in memory, and the nearest one to store.
double read_number(nf4_dtype dtype, const void *data, int64_t i);
double round_to(nf4_dtype dtype, double x);

}  // namespace nf4::test
