// Matmul of integer weights on the CPU: every variant that this machine runs against a naive matmul
// in binary64, with guard pages around every buffer.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/int4.hpp"
#include "cpu/backend.hpp"
#include "nf4/nf4.h"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/cpu_tolerance.hpp"
#include "support/force.hpp"
#include "support/int4_cases.hpp"
#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"
#include "support/placed.hpp"
#include "support/some_of.hpp"
#include "support/variants.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 14;  // per class
constexpr int kThreadCounts[] = {1, 2, 3, 7, 300, 0};
// What the error may be beside y, by dtype.
constexpr double kLargest[] = {1e-6, 5e-4, 4e-3};

// A weight with rows of x.
struct Int4MatmulCase {
  HostInt4Weight weight;
  MatmulCase x;  // all but its weight, of which it has the shape alone

  Int4MatmulCase(Rng &rng, const Int4Class &kind, const Int4Shape &shape, nf4_dtype dtype,
                 int64_t m, XKind x_kind)
      : weight(random_int4_weight(rng, kind, shape, true)),
        x(random_matmul_case(rng, {dtype, 64, false}, CodebookKind::kNf4,
                             {shape.rows, shape.cols, m}, x_kind)) {}
};

// What is multiplied: the codes, and x times the zero point, are summed on their own.
Expected expect(const Int4MatmulCase &test, const nf4_int4_tensor &weight,
                const std::vector<float> &dense, const std::vector<float> &parts, int64_t m,
                int64_t n) {
  Expected y;
  if (!test.x.bias.empty()) y.value = read_number(test.x.dtype, test.x.bias.data(), n);
  y.magnitude = std::fabs(y.value);
  for (int64_t k = 0; k < weight.cols; ++k) {
    const double x = read_number(test.x.dtype, test.x.x.data(), m * test.x.x_stride + k);
    y.value += dense[n * weight.cols + k] * x;
    y.magnitude += std::fabs(parts[n * weight.cols + k] * x);
    y.small += std::fabs(x) + 1;
  }
  return y;
}

std::vector<Expected> expect_all(const Int4MatmulCase &test) {
  const ForcedVariant forced(scalar_variant());
  const nf4_int4_tensor &weight = test.weight.shape;
  const std::vector<float> dense = int4_elements(test.weight);
  const std::vector<float> parts = int4_magnitudes(test.weight);
  std::vector<Expected> y;
  for (int64_t m = 0; m < test.x.m; ++m)
    for (int64_t n = 0; n < weight.rows; ++n) y.push_back(expect(test, weight, dense, parts, m, n));
  return y;
}

struct Placed {
  PlacedInt4Weight weight;
  GuardedBuffer x, bias, y;

  Placed(Rng &rng, const Int4MatmulCase &test)
      : weight(rng, test.weight),
        x(random_buffer(rng, test.x.x.size(), dtype_bytes(test.x.dtype))),
        bias(random_buffer(rng, test.x.bias.size(), dtype_bytes(test.x.dtype))),
        y(random_buffer(rng, test.x.y_bytes(), dtype_bytes(test.x.dtype))) {
    std::copy(test.x.x.begin(), test.x.x.end(), x.data());
    std::copy(test.x.bias.begin(), test.x.bias.end(), bias.data());
  }

  nf4_matmul_args args(const Int4MatmulCase &test) const {
    return test.x.args(x.data(), bias.data(), y.data());
  }
  nf4_status multiply(const Int4MatmulCase &test, int threads) const {
    const nf4_matmul_args given = args(test);
    return nf4_int4_matmul_cpu(&weight.tensor(), &given, threads);
  }
  double at(const Int4MatmulCase &test, int64_t i) const {
    const int64_t rows = test.weight.shape.rows;
    return read_number(test.x.dtype, y.data(), i / rows * test.x.y_stride + i % rows);
  }
  bool gaps_intact(const Int4MatmulCase &test) const {
    const int64_t bytes = dtype_bytes(test.x.dtype);
    const int64_t stride = test.x.y_stride * bytes, row = test.weight.shape.rows * bytes;
    for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i)
      if (i % stride >= row && y.data()[i] != 0xa5) return false;
    return true;
  }
  bool surroundings_intact() const {
    return y.surroundings_intact() && weight.surroundings_intact();
  }
};

bool is_right(const cpu::Variant &variant, const Int4MatmulCase &test, const Expected &expected,
              double y) {
  if (!std::isfinite(expected.value)) return !std::isfinite(y);
  const bool bf16 = in_bf16(variant, test.x.dtype);
  const double roundings = static_cast<double>(test.weight.shape.cols) / 8 + 32;
  const double error = (roundings * 0x1p-24 + (bf16 ? 0x1p-8 : 0)) * expected.magnitude +
                       (bf16 ? 0x1p-126 : 0x1p-149) * expected.small;
  return y >= round_to(test.x.dtype, expected.value - error) &&
         y <= round_to(test.x.dtype, expected.value + error);
}

void check_matmul(const Int4MatmulCase &test, Rng &rng) {
  const std::vector<Expected> expected = expect_all(test);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name << ", dtype " << test.x.dtype << ", m " << test.x.m);
    const ForcedVariant forced(*variant);
    const Placed placed(rng, test);
    REQUIRE(placed.multiply(test, 1) == NF4_STATUS_OK);
    for (size_t i = 0; i < expected.size(); ++i) {
      const double y = placed.at(test, static_cast<int64_t>(i));
      if (is_right(*variant, test, expected[i], y)) continue;
      FAIL("y[" << i << "] is " << y << ", expected " << expected[i].value << ", of the magnitude "
                << expected[i].magnitude);
    }
    REQUIRE(placed.gaps_intact(test));
    REQUIRE(placed.surroundings_intact());
  }
}

int64_t random_m(Rng &rng) {
  if (rng.one_in(8)) return rng.between(90, 110);
  return rng.one_in(3) ? rng.between(1, 30) : rng.between(1, 6);
}

}  // namespace

TEST_CASE("every variant multiplies integer weights within the rounding of its sums", "[matmul]") {
  constexpr XKind kKinds[] = {XKind::kOrdinary, XKind::kOutliers, XKind::kNotFinite,
                              XKind::kPositive};
  uint64_t stream = 0x16000000;
  for (const ColumnOrder order : kColumnOrders)
    for (const Int4Class &kind : int4_classes(order))
      for (int i = 0; i < cases_of((order == ColumnOrder::kPlain ? 2 : 1) * kShapes); ++i) {
        Rng rng(++stream);
        const Int4Shape shape = random_int4_shape(rng, kind.layout);
        const Int4MatmulCase test(rng, kind, shape, rng.pick(kDtypes), random_m(rng),
                                  rng.pick(kKinds));
        INFO(describe(test.weight, stream));
        check_matmul(test, rng);
      }
}

TEST_CASE("long rows of integer weights are multiplied, too", "[matmul]") {
  uint64_t stream = 0x17000000;
  size_t kinds = 0;
  for (const Int4Class &kind : int4_classes())
    for (const nf4_dtype dtype : kDtypes)
      for (const int64_t m : some_of<int64_t>({1, 3, 8, 20}, kinds++)) {
        Rng rng(++stream);
        const Int4MatmulCase test(rng, kind, {8, 14336, 128}, dtype, m, XKind::kOrdinary);
        INFO(describe(test.weight, stream));
        check_matmul(test, rng);
      }
}

TEST_CASE("long rows of scattered groups are multiplied, too", "[matmul]") {
  uint64_t stream = 0x1d000000;
  size_t kinds = 0;
  for (const ColumnOrder order : kColumnOrders)
    for (const Int4Class &kind : int4_classes(order))
      for (const Int4Shape &shape :
           some_of<Int4Shape>({{136, 2304, 128}, {40, 5120, 64}, {24, 4608, 8}}, kinds++)) {
        Rng rng(++stream);
        const Int4MatmulCase test(rng, kind, shape, rng.pick(kDtypes), rng.between(1, 20),
                                  XKind::kOrdinary);
        INFO(describe(test.weight, stream));
        check_matmul(test, rng);
      }
}

TEST_CASE("very few rows of x and scattered groups are multiplied, too", "[matmul]") {
  uint64_t stream = 0x1e000000;
  size_t kinds = 0;
  for (const ColumnOrder order : {ColumnOrder::kGIdx, ColumnOrder::kAnyGIdx, ColumnOrder::kBoth})
    for (const Int4Class &kind : int4_classes(order))
      for (const Int4Shape &shape :
           some_of<Int4Shape>({{200, 2304, 128}, {72, 16640, 128}, {16, 1024, 8}}, kinds++))
        for (const int64_t m : {1, 2}) {
          Rng rng(++stream);
          const Int4MatmulCase test(rng, kind, shape, rng.pick(kDtypes), m, XKind::kOrdinary);
          INFO(describe(test.weight, stream));
          check_matmul(test, rng);
        }
}

TEST_CASE("many rows of integer weights are multiplied, too", "[matmul]") {
  uint64_t stream = 0x18000000;
  for (const Int4Class &kind : int4_classes())
    for (const int64_t m : {1, 4, 11}) {
      Rng rng(++stream);
      const Int4MatmulCase test(rng, kind, {2200, 64, 64}, rng.pick(kDtypes), m, XKind::kOrdinary);
      INFO(describe(test.weight, stream));
      check_matmul(test, rng);
    }
}

TEST_CASE("the error of integer weights is no more than that of a dense weight",
          "[matmul][accuracy]") {
  uint64_t stream = 0x19000000;
  for (const Int4Class &kind : int4_classes())
    for (const nf4_dtype dtype : kDtypes)
      for (const int64_t m : {1, 4, 16}) {
        Rng rng(++stream);
        const Int4MatmulCase test(rng, kind, {24, 4096, 128}, dtype, m, XKind::kOrdinary);
        INFO(describe(test.weight, stream) << ", dtype " << dtype << ", m " << m);
        const std::vector<Expected> expected = expect_all(test);
        const Placed placed(rng, test);
        for (const cpu::Variant *variant : supported_variants()) {
          INFO("variant " << variant->name);
          const ForcedVariant forced(*variant);
          REQUIRE(placed.multiply(test, 1) == NF4_STATUS_OK);
          RelativeError error;
          for (size_t i = 0; i < expected.size(); ++i)
            error.add(placed.at(test, static_cast<int64_t>(i)), expected[i].value);
          CHECK(error.value() <= kLargest[dtype - 1]);
        }
      }
}

TEST_CASE("the number of threads changes no bit of a matmul of integer weights", "[matmul]") {
  Rng rng(0x1a000000);
  for (const nf4_int4_layout layout : kInt4Layouts)
    for (const nf4_dtype dtype : kDtypes)
      for (const int64_t m : {1, 3, 21}) {
        const Int4Class kind{layout, NF4_DTYPE_FP16, true, 0};
        const Int4MatmulCase test(rng, kind, {1504, 256, 128}, dtype, m, XKind::kOutliers);
        for (const cpu::Variant *variant : supported_variants()) {
          if (variant == &scalar_variant()) continue;
          const ForcedVariant forced(*variant);
          const Placed expected(rng, test);
          REQUIRE(expected.multiply(test, 1) == NF4_STATUS_OK);
          for (const int threads : kThreadCounts) {
            INFO("variant " << variant->name << ", threads " << threads << ", m " << m);
            const Placed got(rng, test);
            REQUIRE(got.multiply(test, threads) == NF4_STATUS_OK);
            REQUIRE(std::memcmp(got.y.data(), expected.y.data(), got.y.size()) == 0);
          }
        }
      }
}

TEST_CASE("a batch of integer weights is as many matmuls, to the bit", "[matmul]") {
  Rng rng(0x1b000000);
  const nf4_int4_layout layouts[] = {NF4_INT4_GPTQ, NF4_INT4_AWQ, NF4_INT4_COMPRESSED_TENSORS};
  for (const nf4_dtype dtype : kDtypes) {
    std::vector<Int4MatmulCase> tests;
    for (const nf4_int4_layout layout : layouts)
      tests.emplace_back(rng, Int4Class{layout, NF4_DTYPE_FP16, true, 0},
                         random_int4_shape(rng, layout), dtype, rng.between(1, 12),
                         XKind::kOrdinary);
    std::vector<Placed> one, all;
    std::vector<const nf4_int4_tensor *> weights;
    std::vector<nf4_matmul_args> args;
    for (const Int4MatmulCase &test : tests) {
      one.emplace_back(rng, test);
      REQUIRE(one.back().multiply(test, 2) == NF4_STATUS_OK);
      all.emplace_back(rng, test);
    }
    for (size_t i = 0; i < tests.size(); ++i) {
      weights.push_back(&all[i].weight.tensor());
      args.push_back(all[i].args(tests[i]));
    }
    REQUIRE(nf4_int4_matmul_batch_cpu(weights.data(), args.data(), tests.size(), 2) ==
            NF4_STATUS_OK);
    for (size_t i = 0; i < tests.size(); ++i)
      CHECK(std::memcmp(one[i].y.data(), all[i].y.data(), one[i].y.size()) == 0);
  }
}

TEST_CASE("empty matmuls of integer weights: nothing, the bias, or 0", "[matmul]") {
  Rng rng(0x1c000000);
  for (const Int4Class &kind : int4_classes())
    for (const MatmulShape shape :
         {MatmulShape{16, 64, 0}, MatmulShape{0, 64, 3}, MatmulShape{16, 0, 3}}) {
      const Int4MatmulCase test(rng, kind, {shape.rows, shape.cols, -1}, rng.pick(kDtypes), shape.m,
                                XKind::kOrdinary);
      INFO(describe(test.weight, 0x1c000000));
      check_matmul(test, rng);
    }
}
