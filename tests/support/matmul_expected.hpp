// What a matmul should give, written out naively in binary64.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "support/matmul_cases.hpp"

namespace nf4::test {

// A y in binary64, and what an implementation may make of it.
struct Expected {
  double value = 0;
  double magnitude = 0;  // the sum of what is summed, without signs
  // The same where the codes of an integer weight and its zero points are summed on their own, as
  // kernels may: a scale times 16 is at least |s (q - 8)| + |s (z - 8)|.
  double parts = 0;
  double energy = 0;   // the sum of the squares of what is summed
  double small = 0;    // the sum of factors that an underflow may be multiplied with
  double largest = 0;  // of weights
  // The sum of |x| (1 + |scale| c), with the codebook's largest finite entry c: what numbers
  // that underflow on their way to 16 bits may be multiplied with.
  double coarse = 0;
};

// y[column][row] of a case whose weight is at these addresses, in host memory.
Expected expect(const MatmulCase &test, const nf4_tensor &weight, int64_t column, int64_t row);
Expected expect(const Int4MatmulCase &test, const nf4_int4_tensor &weight, int64_t column,
                int64_t row);

// All of y, [m][rows]. Rows of x that are the same bytes have their numbers in common.
class ExpectedProduct {
 public:
  template <class Host>
  ExpectedProduct(const MatmulCaseOf<Host> &test, const typename Host::Tensor &weight);
  // Of element i.
  const Expected &operator[](int64_t i) const {
    return distinct_[row_of_[i / rows_] * rows_ + i % rows_];
  }

 private:
  int64_t rows_;
  std::vector<int64_t> row_of_;  // of each row of x, in distinct_
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
