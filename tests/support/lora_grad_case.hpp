// Gradients of an adapter's matrices, in host memory, and their expected values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/matrix.hpp"

namespace nf4::test {

struct LoraGradShape {
  int64_t m, rows, cols;
  int rank;
};

// Each size is at least 1, half of them are multiples of 16 except for tails, and the whole is
// small enough for naive sums.
LoraGradShape random_lora_grad_shape(Rng &rng);

// All operands, each between guard pages, with random strides and alignments; p and q are
// contiguous. A test on a GPU copies them, and copies da and db back into these.
struct LoraGradCase {
  Matrix x, dy, p, q, da, db;
  float scale;

  LoraGradCase(Rng &rng, nf4_dtype dtype, nf4_dtype grad_dtype, const LoraGradShape &shape);

  // The arguments with the addresses of the matrices.
  nf4_lora_grad_args args() const;
  void poison_outputs();
  // Around the matrices, and between the rows of da and db.
  bool surroundings_intact() const;
};

// fp32, or the dtype.
nf4_dtype random_grad_dtype(Rng &rng, nf4_dtype dtype);

std::string describe(const LoraGradCase &test, uint64_t stream);

// The sums in binary64, with the scale, and the sums of the terms without signs.
class ExpectedLoraGrad {
 public:
  explicit ExpectedLoraGrad(const LoraGradCase &test);

  // Fails unless each element of da and db is within the rounding of its sum in binary32 and of the
  // gradient's dtype.
  void check(const LoraGradCase &test) const {
    check_da(test);
    check_db(test);
  }
  void check_da(const LoraGradCase &test) const;
  void check_db(const LoraGradCase &test) const;

 private:
  struct Sum {
    double value = 0, magnitude = 0;
  };
  static std::vector<Sum> sums(const Matrix &left, const Matrix &right, float scale);
  static void check(const LoraGradCase &test, const Matrix &got, const Sum &sum, int64_t row,
                    int64_t column);

  std::vector<Sum> da_;  // [rank][cols]
  std::vector<Sum> db_;  // [rank][rows]
};

}  // namespace nf4::test
