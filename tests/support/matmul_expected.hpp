// The expected result of a matmul, computed naively in binary64.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "support/matmul_cases.hpp"

namespace nf4::test {

// A y in binary64, and the quantities that bound an implementation's error.
struct Expected {
  double value = 0;
  double magnitude = 0;  // the sum of the terms without signs
  double energy = 0;     // the sum of the squares of the terms
  double small = 0;      // the sum of factors by which an underflow may be multiplied
  double largest = 0;    // the largest weight
  // The sum of |x| (1 + |scale| c), with the codebook's largest finite entry c: the factor of
  // numbers that underflow on their way to 16 bits.
  double coarse = 0;
};

// y[column][row] of a case whose weight is at these addresses, in host memory.
Expected expect(const MatmulCase &test, const nf4_tensor &weight, int64_t column, int64_t row);
Expected expect(const MatmulCaseOf<HostInt4Weight> &test, const nf4_int4_tensor &weight,
                int64_t column, int64_t row);

// All of y, [m][rows]. Rows of x with the same bytes share their numbers.
class ExpectedProduct {
 public:
  template <class Host>
  ExpectedProduct(const MatmulCaseOf<Host> &test, const typename Host::Tensor &weight);
  // The expected element i.
  const Expected &operator[](int64_t i) const {
    return distinct_[row_of_[i / rows_] * rows_ + i % rows_];
  }

 private:
  int64_t rows_;
  std::vector<int64_t> row_of_;  // the index of each row of x in distinct_
  std::vector<Expected> distinct_;
};

// ||y - expected|| / ||expected||
struct RelativeError {
  double error = 0;
  double norm = 0;

  void add(double y, double expected) {
    error += (y - expected) * (y - expected);
    norm += expected * expected;
  }
  double value() const { return std::sqrt(error / norm); }
};

}  // namespace nf4::test
