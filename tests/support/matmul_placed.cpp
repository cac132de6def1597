#include "support/matmul_placed.hpp"

#include <cmath>
#include <vector>

#include "cuda/matmul/matmul.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/families.hpp"
#include "support/force_matmul.hpp"
#include "support/matmul_expected.hpp"
#include "validate.hpp"

namespace nf4::test {
namespace {

nf4_status workspace_size(const nf4_tensor *weight, const nf4_matmul_args *args, bool gradient,
                          size_t *bytes) {
  return gradient ? nf4_matmul_grad_workspace_size(weight, args, bytes)
                  : nf4_matmul_workspace_size(weight, args, bytes);
}
nf4_status workspace_size(const nf4_int4_tensor *weight, const nf4_matmul_args *args, bool,
                          size_t *bytes) {
  return nf4_int4_matmul_workspace_size(weight, args, bytes);
}

nf4_status launch(const nf4_tensor *weight, const nf4_matmul_args *args, bool gradient,
                  void *workspace, size_t bytes, cudaStream_t stream) {
  return gradient ? nf4_matmul_grad_launch(weight, args, workspace, bytes, stream)
                  : nf4_matmul_launch(weight, args, workspace, bytes, stream);
}
nf4_status launch(const nf4_int4_tensor *weight, const nf4_matmul_args *args, bool, void *workspace,
                  size_t bytes, cudaStream_t stream) {
  return nf4_int4_matmul_launch(weight, args, workspace, bytes, stream);
}

template <class Host>
size_t workspace_bytes(const MatmulCaseOf<Host> &test, const DeviceWeightOf<Host> &weight) {
  size_t bytes = 0;
  const nf4_matmul_args args = test.args(nullptr, nullptr, nullptr);
  REQUIRE(workspace_size(&weight.tensor(), &args, test.gradient, &bytes) == NF4_STATUS_OK);
  return bytes;
}

nf4_tensor in_place(HostWeight &weight) {
  std::array<void *, kPartCount> addresses{};
  for (int part = 0; part < kPartCount; ++part)
    if (weight.has(Part(part))) addresses[part] = weight.bytes[part].data();
  return weight.at(addresses);
}
nf4_int4_tensor in_place(HostInt4Weight &weight) { return weight.in_place(); }

// Finds the configuration that a launch would use.
nf4_status config_of(const MatmulProblem &problem, int &config) {
  return problem.gradient ? cuda::matmul_grad_config(problem, nullptr, config)
                          : cuda::matmul_config(problem, nullptr, config);
}
nf4_status config_of(const Int4MatmulProblem &problem, int &config) {
  return cuda::matmul_config(problem, nullptr, config);
}

MatmulProblem problem_of(const nf4_tensor &) { return {}; }
Int4MatmulProblem problem_of(const nf4_int4_tensor &) { return {}; }

// The allowed distance of numbers of a dtype from exact ones: relative, and where they underflow.
struct Precision {
  double unit, underflow, largest;
  double on_average;
};
// Products in fp32 are products of two parts of fp16, relative to the largest of 256 numbers.
Precision precision_of(nf4_dtype dtype) {
  if (dtype == NF4_DTYPE_FP32) return {0x1p-21, 0x1p-38, 0x1p126, 1e-6};
  if (dtype == NF4_DTYPE_BF16) return {0x1p-8, 0x1p-126, 0x1p126, 4e-3};
  return {0x1p-11, 0x1p-24, 65000, 5e-4};
}

// The memory between the rows of y is unchanged.
template <class Host>
bool gaps_intact(const MatmulCaseOf<Host> &test, const std::vector<uint8_t> &y) {
  const int bytes = dtype_bytes(test.dtype);
  const int64_t stride = test.y_stride * bytes, row = test.y_columns() * bytes;
  for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i)
    if (i % stride >= row && y[i] != 0xa5) return false;
  return true;
}

// Checks y as a whole, as is_right alone would not notice an error in a column of thousands. Sums
// of many numbers of either sign are about as large as the root of the sum of their squares.
template <class Host>
bool is_right_on_average(const MatmulCaseOf<Host> &test, const ExpectedProduct &expected,
                         const std::vector<uint8_t> &y) {
  const int64_t rows = test.y_columns();
  double squares = 0, energy = 0;
  for (int64_t i = 0; i < test.m * rows; ++i) {
    const double got = read_number(test.dtype, y.data(), i / rows * test.y_stride + i % rows);
    squares += (got - expected[i].value) * (got - expected[i].value);
    energy += expected[i].energy;
  }
  const double most = precision_of(test.dtype).on_average;
  return squares <= most * most * energy;
}

// The first number of y that is wrong, or -1. An assertion for each number would take most of the
// time.
template <class Host>
int64_t first_wrong(const MatmulCaseOf<Host> &test, const ExpectedProduct &expected,
                    const std::vector<uint8_t> &y, double &got) {
  const int64_t rows = test.y_columns();
  for (int64_t i = 0; i < test.m * rows; ++i) {
    got = read_number(test.dtype, y.data(), i / rows * test.y_stride + i % rows);
    if (!is_right(test, expected[i], got)) return i;
  }
  return -1;
}

// Runs the kernels of all families on one placement of a case.
template <class Host>
void check_placed(const MatmulCaseOf<Host> &test, const PlacedMatmulOf<Host> &placed,
                  const ExpectedProduct &expected, const Stream &stream, MatmulCounts &counts,
                  Judged judged, ConfigRange configs) {
  const int64_t rows = test.y_columns();
  for (const cuda::GpuFamily *family : runnable_families()) {
    for (int config = configs.first; config < configs.end; ++config) {
      INFO("family " << family->name << ", " << cuda::kMatmulConfigs[config].name);
      const ForcedMatmul forced(family, config);
      if (placed.used(test) != config) continue;
      ++counts[family][config];
      if (placed.y.size() != 0) fill_bytes(placed.y.data(), 0xa5, placed.y.size());
      REQUIRE(placed.multiply(test, stream) == NF4_STATUS_OK);
      stream.synchronize();
      const std::vector<uint8_t> y = placed.y.read();
      double got = 0;
      const int64_t wrong = first_wrong(test, expected, y, got);
      if (wrong >= 0)
        FAIL("y[" << wrong / rows << "][" << wrong % rows << "] is " << got << ", expected "
                  << expected[wrong].value << ", of the magnitude " << expected[wrong].magnitude);
      if (judged == Judged::kEachAndAll) REQUIRE(is_right_on_average(test, expected, y));
      REQUIRE(gaps_intact(test, y));
      REQUIRE(placed.y.lead_intact());
      REQUIRE(placed.workspace.lead_intact());
      REQUIRE(placed.weight.leads_intact());
    }
  }
}

}  // namespace

template <class Host>
bool is_right(const MatmulCaseOf<Host> &test, const Expected &expected, double y) {
  const Precision precision = precision_of(test.dtype);
  if (!std::isfinite(expected.value)) return !std::isfinite(y);
  if (expected.magnitude > 0x1p126 || expected.largest > precision.largest) return true;
  const double sums = static_cast<double>(test.x_columns()) / 8 + 64;
  // A single product may be everything. Its weight is rounded after the entry's own error (nf4.h).
  const bool exact = test.dtype == NF4_DTYPE_FP32 || !std::is_same_v<Host, HostWeight>;
  const double entry = exact ? 0 : test.gradient ? 3.0 / 8 : 1.0 / 6;
  const double unit = precision.unit * (1 + entry);
  const double error =
      (unit + sums * 0x1p-24) * expected.magnitude + precision.underflow * expected.coarse;
  return y >= round_to(test.dtype, expected.value - error) &&
         y <= round_to(test.dtype, expected.value + error);
}

template <class Host>
PlacedMatmulOf<Host>::PlacedMatmulOf(Rng &rng, const MatmulCaseOf<Host> &test, bool aligned)
    : weight(rng, test.weight, aligned),
      x(test.x.size(), aligned ? 0 : random_lead(rng, dtype_bytes(test.dtype))),
      bias(test.bias.size(), aligned ? 0 : random_lead(rng, dtype_bytes(test.dtype))),
      y(test.y_bytes(), aligned ? 0 : random_lead(rng, dtype_bytes(test.dtype))),
      workspace(workspace_bytes(test, weight), 64) {
  x.write(test.x.data());
  bias.write(test.bias.data());
}

template <class Host>
nf4_matmul_args PlacedMatmulOf<Host>::args(const MatmulCaseOf<Host> &test) const {
  return test.args(x.data(), bias.data(), y.data());
}

template <class Host>
int PlacedMatmulOf<Host>::used(const MatmulCaseOf<Host> &test) const {
  const nf4_matmul_args given = args(test);
  auto problem = problem_of(weight.tensor());
  problem.gradient = test.gradient;
  REQUIRE(validate_matmul_shape(&weight.tensor(), &given, problem) == NF4_STATUS_OK);
  REQUIRE(validate_matmul_operands(&weight.tensor(), &given, nullptr, 0, problem) == NF4_STATUS_OK);
  int config;
  REQUIRE(config_of(problem, config) == NF4_STATUS_OK);
  return config;
}

template <class Host>
nf4_status PlacedMatmulOf<Host>::multiply(const MatmulCaseOf<Host> &test,
                                          cudaStream_t stream) const {
  const nf4_matmul_args given = args(test);
  return launch(&weight.tensor(), &given, test.gradient, workspace.data(), workspace.size(),
                stream);
}

template <class Host>
void check_matmul(MatmulCaseOf<Host> &test, Rng &rng, const Stream &stream, MatmulCounts &counts,
                  Judged judged, ConfigRange configs) {
  const ExpectedProduct expected(test, in_place(test.weight));
  for (const bool aligned : {false, true}) {
    INFO((aligned ? "aligned" : "as it comes"));
    check_placed(test, PlacedMatmulOf<Host>(rng, test, aligned), expected, stream, counts, judged,
                 configs);
  }
}

template bool is_right(const MatmulCase &, const Expected &, double);
template struct PlacedMatmulOf<HostWeight>;
template struct PlacedMatmulOf<HostInt4Weight>;
template void check_matmul(MatmulCase &, Rng &, const Stream &, MatmulCounts &, Judged,
                           ConfigRange);
template void check_matmul(MatmulCaseOf<HostInt4Weight> &, Rng &, const Stream &, MatmulCounts &,
                           Judged, ConfigRange);

}  // namespace nf4::test
