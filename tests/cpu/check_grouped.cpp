// Products of experts on the CPU, of codebook weights of any scales: every variant against a naive
// loop over the rows of y in binary64, with guard pages around every buffer.
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
#include "support/variants.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 80;  // per dtype, flat or nested

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

  nf4_status multiply() {
    y.poison();
    const nf4_grouped_args args = grouped_args(
        test, {x.data(), bias.data(), ends.data(), x_index.data(), row_scale.data(), y.data()});
    return nf4_matmul_grouped_cpu(&weight.tensor(), &args, 1);
  }
  double operator()(int64_t row, int64_t n) const {
    return read_number(test.all.dtype, y.data(), row * test.y_stride + n);
  }
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
    REQUIRE(placed.multiply() == NF4_STATUS_OK);
    for (size_t i = 0; i < expected.size(); ++i) {
      const int64_t row = i / test.shape.n, n = i % test.shape.n;
      if (test.expert_of(row) < 0) continue;
      if (is_right(*variant, test.all.dtype, test.shape.k, true, expected[i], placed(row, n)))
        continue;
      INFO("y[" << row << "][" << n << "] of expert " << test.expert_of(row) << " is "
                << placed(row, n) << ", expected " << expected[i].value);
      FAIL();
    }
    REQUIRE(placed.gaps_intact());
    REQUIRE(placed.surroundings_intact());
  }
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
