// Products of experts on the CPU: every variant against a naive loop over the rows of y in
// binary64, with guard pages around every buffer.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/backend.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/cpu_tolerance.hpp"
#include "support/force.hpp"
#include "support/grouped_cases.hpp"
#include "support/placed.hpp"
#include "support/some_of.hpp"
#include "support/variants.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 80;  // per dtype, flat or nested
constexpr int kThreadCounts[] = {2, 3, 7, 300, 0};

// The operands of a case, each between guard pages.
struct Placed {
  const GroupedCase &test;
  PlacedWeight weight;
  GuardedBuffer x, bias, ends, x_index, row_scale, y;

  Placed(Rng &rng, const GroupedCase &of)
      : test(of),
        weight(rng, of.all.weight),
        x(copy(rng, of.all.x, dtype_bytes(of.all.dtype))),
        bias(copy(rng, of.bias, dtype_bytes(of.all.dtype))),
        ends(copy(rng, of.ends, 4)),
        x_index(copy(rng, of.x_index, 4)),
        row_scale(copy(rng, of.row_scale, 4)),
        y(random_buffer(rng, of.y_bytes(), dtype_bytes(of.all.dtype))) {}

  template <class T>
  static GuardedBuffer copy(Rng &rng, const std::vector<T> &from, int alignment) {
    GuardedBuffer buffer = random_buffer(rng, from.size() * sizeof(T), alignment);
    if (!from.empty()) std::memcpy(buffer.data(), from.data(), buffer.size());
    return buffer;
  }

  nf4_status multiply(int threads) {
    y.poison();
    const nf4_grouped_args args = grouped_args(
        test, {x.data(), bias.data(), ends.data(), x_index.data(), row_scale.data(), y.data()});
    return nf4_matmul_grouped_cpu(&weight.tensor(), &args, threads);
  }
  double operator()(int64_t row, int64_t n) const {
    return read_number(test.all.dtype, y.data(), row * test.y_stride + n);
  }
  std::vector<uint8_t> y_bytes() const { return {y.data(), y.data() + y.size()}; }
  bool gaps_intact() const {
    const int64_t item = dtype_bytes(test.all.dtype);
    for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i)
      if (i % (test.y_stride * item) >= test.shape.n * item && y.data()[i] != 0xa5) return false;
    return true;
  }
  bool surroundings_intact() const {
    for (const GuardedBuffer *buffer : {&x, &bias, &ends, &x_index, &row_scale, &y})
      if (!buffer->surroundings_intact()) return false;
    return weight.surroundings_intact();
  }
};

void check_grouped(const GroupedCase &test, Rng &rng) {
  Placed placed(rng, test);
  std::vector<Expected> expected(test.shape.m * test.shape.n);
  for (size_t i = 0; i < expected.size(); ++i) {
    const int64_t row = i / test.shape.n;
    if (test.expert_of(row) >= 0)
      expected[i] = expect(test, placed.weight.tensor(), row, i % test.shape.n);
  }
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    REQUIRE(placed.multiply(1) == NF4_STATUS_OK);
    for (size_t i = 0; i < expected.size(); ++i) {
      const int64_t row = i / test.shape.n, n = i % test.shape.n;
      if (test.expert_of(row) < 0) continue;
      if (is_right(*variant, test.all.dtype, test.shape.k, expected[i], placed(row, n))) continue;
      INFO("y[" << row << "][" << n << "] of expert " << test.expert_of(row) << " is "
                << placed(row, n) << ", expected " << expected[i].value);
      FAIL();
    }
    REQUIRE(placed.gaps_intact());
    REQUIRE(placed.surroundings_intact());
  }
}

// The error of a product of weights that are rounded to the dtype, and then exact.
double dense_y(const GroupedCase &test, const std::vector<uint8_t> &weight, int64_t row,
               int64_t n) {
  const int64_t of_all = test.expert_of(row) * test.shape.n + n, x_row = test.x_row_of(row);
  const nf4_dtype dtype = test.all.dtype;
  double sum = test.bias.empty() ? 0 : read_number(dtype, test.all.bias.data(), of_all);
  for (int64_t k = 0; k < test.shape.k && x_row >= 0; ++k)
    sum += read_number(dtype, weight.data(), of_all * test.shape.k + k) *
           read_number(dtype, test.all.x.data(), x_row * test.all.x_stride + k);
  return round_to(dtype, test.row_scale.empty() ? sum : sum * double{test.row_scale[row]});
}

}  // namespace

TEST_CASE("every variant multiplies the rows of experts within the rounding of its sums",
          "[matmul]") {
  uint64_t stream = 0x31000000;
  for (const nf4_dtype dtype : kDtypes)
    for (const bool nested : {false, true})
      for (int i = 0; i < cases_of(kShapes); ++i) {
        Rng rng(++stream);
        const CaseClass kind{dtype, kBlocksizes[rng.below(5)], nested};
        const GroupedShape shape = random_grouped_shape(rng, kind.blocksize);
        const GroupedCase test =
            random_grouped_case(rng, kind, shape, rng.pick(kRoutings), rng.one_in(3));
        INFO(describe(test, stream));
        check_grouped(test, rng);
      }
}

TEST_CASE("the error of experts is no more than that of dense weights", "[matmul][accuracy]") {
  uint64_t stream = 0x32000000;
  for (const nf4_dtype dtype : kDtypes16)
    for (const int64_t m : {4, 30, 200}) {
      Rng rng(++stream);
      const GroupedCase test =
          random_grouped_case(rng, {dtype, 64, true}, {4, 48, 1024, m}, Routing::kAny, true);
      INFO(describe(test, stream));
      Placed placed(rng, test);
      const nf4_tensor &weight = placed.weight.tensor();
      std::vector<uint8_t> dense(weight.rows * weight.cols * dtype_bytes(dtype));
      REQUIRE(nf4_dequant_cpu(&weight, dense.data(), dtype, 0) == NF4_STATUS_OK);
      for (const cpu::Variant *variant : supported_variants()) {
        INFO("variant " << variant->name);
        const ForcedVariant forced(*variant);
        REQUIRE(placed.multiply(0) == NF4_STATUS_OK);
        RelativeError ours, of_dense;
        for (int64_t row = 0; row < m; ++row)
          for (int64_t n = 0; n < test.shape.n; ++n) {
            const double exact = expect(test, weight, row, n).value;
            ours.add(placed(row, n), exact);
            of_dense.add(dense_y(test, dense, row, n), exact);
          }
        CHECK(ours.value() <= 1.1 * of_dense.value());
      }
    }
}

TEST_CASE("the number of threads changes no bit of the products of experts", "[matmul]") {
  uint64_t stream = 0x33000000;
  size_t dtypes = 0;
  for (const nf4_dtype dtype : kDtypes)
    for (const GroupedShape shape : some_of<GroupedShape>(
             {{128, 96, 512, 40}, {3, 1000, 704, 90}, {60, 33, 2080, 9}}, dtypes++)) {
      Rng rng(++stream);
      const GroupedCase test =
          random_grouped_case(rng, {dtype, 32, true}, shape, rng.pick(kRoutings), true);
      INFO(describe(test, stream));
      Placed placed(rng, test);
      for (const cpu::Variant *variant : supported_variants()) {
        if (variant->supported == scalar_variant().supported) continue;  // slow
        INFO("variant " << variant->name);
        const ForcedVariant forced(*variant);
        REQUIRE(placed.multiply(1) == NF4_STATUS_OK);
        const auto bytes = placed.y_bytes();
        for (const int threads : kThreadCounts) {
          REQUIRE(placed.multiply(threads) == NF4_STATUS_OK);
          CHECK(placed.y_bytes() == bytes);
        }
      }
    }
}

TEST_CASE("products of experts without anything to multiply", "[matmul]") {
  Rng rng(0x34000000);
  for (const GroupedShape shape :
       {GroupedShape{0, 0, 64, 0}, GroupedShape{0, 0, 64, 5}, GroupedShape{4, 0, 64, 5},
        GroupedShape{4, 16, 64, 0}, GroupedShape{4, 16, 0, 5}}) {
    const GroupedCase test =
        random_grouped_case(rng, {NF4_DTYPE_BF16, 64, true}, shape, Routing::kAny, false);
    INFO(describe(test, 0));
    check_grouped(test, rng);
  }
}
