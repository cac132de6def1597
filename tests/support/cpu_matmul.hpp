// Products of codebook and of integer weights on the CPU: their operands between guard pages, and
// every variant that this machine runs against a naive product in binary64.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/backend.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/cpu_expected.hpp"
#include "support/cpu_tolerance.hpp"
#include "support/force.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"
#include "support/placed.hpp"
#include "support/variants.hpp"

namespace nf4::test {

constexpr int kThreadCounts[] = {1, 2, 3, 7, 300, 0};
// How large the error of y may be beside y, by dtype.
constexpr double kLargestError[] = {1e-6, 5e-4, 4e-3};

// The functions of each kind of weight.
inline nf4_status dequant_cpu(const nf4_tensor &weight, void *out, nf4_dtype dtype, int threads) {
  return nf4_dequant_cpu(&weight, out, dtype, threads);
}
inline nf4_status dequant_cpu(const nf4_int4_tensor &weight, void *out, nf4_dtype dtype,
                              int threads) {
  return nf4_int4_dequant_cpu(&weight, out, dtype, threads);
}
inline nf4_status matmul_cpu(const nf4_tensor &weight, const nf4_matmul_args &args, int threads) {
  return nf4_matmul_cpu(&weight, &args, threads);
}
inline nf4_status matmul_cpu(const nf4_int4_tensor &weight, const nf4_matmul_args &args,
                             int threads) {
  return nf4_int4_matmul_cpu(&weight, &args, threads);
}

// x, bias, y and the weight of a case, each between guard pages.
template <class Host>
struct CpuMatmul {
  const MatmulCaseOf<Host> &test;
  PlacedWeightOf<Host> weight;
  GuardedBuffer x, bias, y;

  CpuMatmul(Rng &rng, const MatmulCaseOf<Host> &of)
      : test(of),
        weight(rng, of.weight),
        x(random_buffer(rng, of.x.size(), dtype_bytes(of.dtype))),
        bias(random_buffer(rng, of.bias.size(), dtype_bytes(of.dtype))),
        y(random_buffer(rng, of.y_bytes(), dtype_bytes(of.dtype))) {
    std::copy(test.x.begin(), test.x.end(), x.data());
    std::copy(test.bias.begin(), test.bias.end(), bias.data());
  }

  nf4_matmul_args args() const { return test.args(x.data(), bias.data(), y.data()); }
  nf4_status multiply(int threads) const { return matmul_cpu(weight.tensor(), args(), threads); }
  // Element i of [m][rows].
  double operator[](int64_t i) const {
    const int64_t rows = test.weight.shape.rows;
    return read_number(test.dtype, y.data(), i / rows * test.y_stride + i % rows);
  }
  std::vector<uint8_t> bytes() const { return {y.data(), y.data() + y.size()}; }
  // Is the poison between the rows of y and around the buffers as it was, and what is read?
  bool surroundings_intact() const {
    const int64_t item = dtype_bytes(test.dtype);
    for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i)
      if (i % (test.y_stride * item) >= test.weight.shape.rows * item && y.data()[i] != 0xa5)
        return false;
    for (int part = 0; part < Host::kParts; ++part)
      if (!weight.unchanged(part)) return false;
    return y.surroundings_intact() && weight.surroundings_intact() &&
           std::equal(test.x.begin(), test.x.end(), x.data()) &&
           std::equal(test.bias.begin(), test.bias.end(), bias.data());
  }
};

// The reference takes longer than all other variants together, where there are any.
template <class Host>
bool is_slow(const cpu::Variant *variant, const MatmulCaseOf<Host> &test) {
  return variant == &scalar_variant() && supported_variants().size() > 1 &&
         test.m * test.weight.elements() >= 1 << 18;
}

// The reference has one loop for all shapes: of products that take it long, the other variants' are
// checked alone.
template <class Host>
void check_matmul(const MatmulCaseOf<Host> &test, Rng &rng) {
  constexpr bool kHasCodebook = std::is_same_v<Host, HostWeight>;
  const int64_t rows = test.weight.shape.rows;
  const std::vector<Expected> expected =
      expect_all(test, PlacedWeightOf<Host>(rng, test.weight).tensor());
  for (const cpu::Variant *variant : supported_variants()) {
    if (is_slow(variant, test)) continue;
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    const CpuMatmul<Host> placed(rng, test);
    REQUIRE(placed.multiply(1) == NF4_STATUS_OK);
    for (int64_t i = 0; i < test.m * rows; ++i) {
      // An assertion for each would take most of the time.
      if (is_right(*variant, test.dtype, test.weight.shape.cols, kHasCodebook, expected[i],
                   placed[i]))
        continue;
      FAIL("y[" << i / rows << "][" << i % rows << "] is " << placed[i] << ", expected "
                << expected[i].value << ", of the magnitude " << expected[i].parts);
    }
    REQUIRE(placed.surroundings_intact());
  }
}

// The error of dequantizing to the dtype, multiplying exactly, and rounding.
template <class Host>
double error_of_dense(const CpuMatmul<Host> &placed, const std::vector<Expected> &expected) {
  const MatmulCaseOf<Host> &test = placed.test;
  const int64_t rows = test.weight.shape.rows, cols = test.weight.shape.cols;
  std::vector<uint8_t> bytes(rows * cols * dtype_bytes(test.dtype));
  REQUIRE(dequant_cpu(placed.weight.tensor(), bytes.data(), test.dtype, 1) == NF4_STATUS_OK);
  const auto numbers = [&](const std::vector<uint8_t> &from, int64_t count, int64_t stride) {
    std::vector<double> to(count * cols);
    for (int64_t i = 0; i < count * cols; ++i)
      to[i] = read_number(test.dtype, from.data(), i / cols * stride + i % cols);
    return to;
  };
  const std::vector<double> dense = numbers(bytes, rows, cols);
  const std::vector<double> x = numbers(test.x, test.m, test.x_stride);
  RelativeError error;
  for (int64_t i = 0; i < test.m * rows; ++i) {
    const int64_t column = i / rows, row = i % rows;
    double sum = test.bias.empty() ? 0 : read_number(test.dtype, test.bias.data(), row);
    for (int64_t k = 0; k < cols; ++k) sum += dense[row * cols + k] * x[column * cols + k];
    error.add(round_to(test.dtype, sum), expected[i].value);
  }
  return error.value();
}

// ||y - expected|| / ||expected|| of every variant, at most `largest` and 1.1 times that of a dense
// weight; of the variant `as_dense`, the latter alone.
template <class Host>
void check_error(const MatmulCaseOf<Host> &test, double largest, Rng &rng,
                 const std::string &as_dense = "") {
  const CpuMatmul<Host> placed(rng, test);
  const std::vector<Expected> expected = expect_all(test, placed.weight.tensor());
  // In fp32 the dense product, in binary64, has none of the sum's roundings.
  const double dense = test.dtype == NF4_DTYPE_FP32 ? INFINITY : error_of_dense(placed, expected);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    REQUIRE(placed.multiply(1) == NF4_STATUS_OK);
    RelativeError error;
    for (int64_t i = 0; i < test.m * test.weight.shape.rows; ++i)
      error.add(placed[i], expected[i].value);
    if (variant->name != as_dense) CHECK(error.value() <= largest);
    CHECK(error.value() <= 1.1 * dense);
  }
}

template <class Host>
void check_thread_counts(const MatmulCaseOf<Host> &test, Rng &rng) {
  for (const cpu::Variant *variant : supported_variants()) {
    const ForcedVariant forced(*variant);
    const CpuMatmul<Host> expected(rng, test);
    REQUIRE(expected.multiply(1) == NF4_STATUS_OK);
    for (const int threads : kThreadCounts) {
      // Any variant's rows are dealt to threads by the same code.
      if (threads != 3 && is_slow(variant, test)) continue;
      INFO("variant " << variant->name << ", threads " << threads << ", m " << test.m);
      const CpuMatmul<Host> got(rng, test);
      REQUIRE(got.multiply(threads) == NF4_STATUS_OK);
      CHECK(got.bytes() == expected.bytes());
    }
  }
}

}  // namespace nf4::test
