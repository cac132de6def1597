// Gradients of an adapter's matrices on the CPU: every variant that this machine runs against naive
// sums in binary64, with guard pages around every buffer.
#include <cmath>
#include <vector>

#include "cpu/backend.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/force.hpp"
#include "support/lora_grad_case.hpp"
#include "support/some_of.hpp"
#include "support/variants.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 60;  // per dtype
constexpr int kThreadCounts[] = {2, 3, 7, 0};

nf4_status run(LoraGradCase &test, const nf4_lora_grad_args &args, int threads = 1) {
  test.poison_outputs();
  return nf4_lora_grad_cpu(&args, threads);
}
nf4_status run(LoraGradCase &test, int threads = 1) { return run(test, test.args(), threads); }

void check_variants(LoraGradCase &test, uint64_t stream) {
  INFO(describe(test, stream));
  const ExpectedLoraGrad expected(test);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    REQUIRE(run(test) == NF4_STATUS_OK);
    expected.check(test);
    CHECK(test.surroundings_intact());
  }
}

}  // namespace

TEST_CASE("every variant's gradients of an adapter are within the rounding of their sums",
          "[matmul]") {
  uint64_t stream = 0x27000000;
  for (const nf4_dtype dtype : kDtypes)
    for (int i = 0; i < cases_of(kShapes); ++i) {
      Rng rng(++stream);
      LoraGradCase test(rng, dtype, random_grad_dtype(rng, dtype), random_lora_grad_shape(rng));
      check_variants(test, stream);
    }
}

// Long sums, and more than one strip of columns.
TEST_CASE("gradients of an adapter of many rows and columns", "[matmul]") {
  uint64_t stream = 0x27400000;
  for (const nf4_dtype dtype : kDtypes)
    for (const LoraGradShape &shape :
         {LoraGradShape{3001, 130, 70, 5}, LoraGradShape{65, 1100, 2049, 16}}) {
      Rng rng(++stream);
      LoraGradCase test(rng, dtype, NF4_DTYPE_FP32, shape);
      check_variants(test, stream);
    }
}

TEST_CASE("the reference's gradients of an adapter are the sums, rounded to binary32 and the dtype",
          "[reference]") {
  uint64_t stream = 0x27800000;
  const ForcedVariant forced(scalar_variant());
  for (const nf4_dtype dtype : kDtypes)
    for (const nf4_dtype grad_dtype : {NF4_DTYPE_FP32, dtype}) {
      Rng rng(++stream);
      LoraGradCase test(rng, dtype, grad_dtype, {33, 19, 23, 9});
      REQUIRE(run(test) == NF4_STATUS_OK);
      const auto sum_of = [&](const Matrix &left, int64_t r, const Matrix &right, int64_t column) {
        double sum = 0;
        for (int64_t i = 0; i < left.rows; ++i) sum += left(i, r) * right(i, column);
        return round_to(grad_dtype, sum * test.scale);
      };
      for (int64_t r = 0; r < 9; ++r) {
        for (int64_t k = 0; k < 23; ++k) CHECK(test.da(r, k) == sum_of(test.q, r, test.x, k));
        for (int64_t n = 0; n < 19; ++n) CHECK(test.db(n, r) == sum_of(test.p, r, test.dy, n));
      }
    }
}

TEST_CASE("the number of threads changes no bit of an adapter's gradients", "[matmul]") {
  uint64_t stream = 0x27c00000;
  size_t dtypes = 0;
  for (const nf4_dtype dtype : kDtypes)
    for (const LoraGradShape &shape :
         some_of<LoraGradShape>({{300, 2080, 1503, 16}, {77, 700, 4100, 128}}, dtypes++)) {
      Rng rng(++stream);
      LoraGradCase test(rng, dtype, random_grad_dtype(rng, dtype), shape);
      INFO(describe(test, stream));
      for (const cpu::Variant *variant : supported_variants()) {
        if (variant->supported == scalar_variant().supported) continue;  // slow
        INFO("variant " << variant->name);
        const ForcedVariant forced(*variant);
        REQUIRE(run(test) == NF4_STATUS_OK);
        const auto da = test.da.bytes(), db = test.db.bytes();
        for (const int threads : kThreadCounts) {
          REQUIRE(run(test, threads) == NF4_STATUS_OK);
          CHECK(test.da.bytes() == da);
          CHECK(test.db.bytes() == db);
        }
      }
    }
}

TEST_CASE("a number that is not finite affects its column, or its rank", "[matmul]") {
  constexpr int kRank = 9;
  Rng rng(0x28000000);
  for (const nf4_dtype dtype : kDtypes)
    for (const float bad : {NAN, INFINITY}) {
      LoraGradCase test(rng, dtype, dtype, {51, 70, 333, kRank});
      test.x.set(50, 332, bad);
      test.q.set(3, 8, bad);
      test.dy.set(17, 0, bad);
      test.p.set(50, 0, bad);
      for (const cpu::Variant *variant : supported_variants()) {
        INFO("variant " << variant->name << ", dtype " << dtype << ", " << bad);
        const ForcedVariant forced(*variant);
        REQUIRE(run(test) == NF4_STATUS_OK);
        for (int64_t r = 0; r < kRank; ++r) {
          for (int64_t k = 0; k < 333; ++k)
            CHECK(std::isfinite(test.da(r, k)) == (k != 332 && r != 8));
          for (int64_t n = 0; n < 70; ++n)
            CHECK(std::isfinite(test.db(n, r)) == (n != 0 && r != 0));
        }
      }
    }
}

TEST_CASE("without rows of x, an adapter's gradients are 0 and nothing is read", "[matmul]") {
  Rng rng(0x28400000);
  for (const nf4_dtype dtype : kDtypes)
    for (const nf4_dtype grad_dtype : {NF4_DTYPE_FP32, dtype})
      for (const cpu::Variant *variant : supported_variants()) {
        INFO("variant " << variant->name << ", dtype " << dtype);
        const ForcedVariant forced(*variant);
        LoraGradCase test(rng, dtype, grad_dtype, {0, 37, 300, 5});
        nf4_lora_grad_args args = test.args();
        args.x = args.dy = args.p = args.q = nullptr;
        REQUIRE(run(test, args) == NF4_STATUS_OK);
        for (int64_t r = 0; r < 5; ++r) {
          for (int64_t k = 0; k < 300; ++k) CHECK(test.da(r, k) == 0);
          for (int64_t n = 0; n < 37; ++n) CHECK(test.db(n, r) == 0);
        }
        CHECK(test.surroundings_intact());
      }
}

TEST_CASE("a gradient that is not wanted, or has no elements, is not looked at", "[matmul]") {
  Rng rng(0x28800000);
  for (const cpu::Variant *variant : supported_variants()) {
    INFO("variant " << variant->name);
    const ForcedVariant forced(*variant);
    LoraGradCase test(rng, NF4_DTYPE_BF16, NF4_DTYPE_BF16, {12, 40, 70, 3});
    const ExpectedLoraGrad expected(test);
    for (const bool empty : {false, true}) {
      nf4_lora_grad_args args = test.args();
      (empty ? args.cols : args.da_stride) = 0;
      args.x = args.q = nullptr;
      args.x_stride = -1;
      if (!empty) args.da = nullptr;
      REQUIRE(run(test, args) == NF4_STATUS_OK);
      CHECK(test.da.buffer.untouched());
      expected.check_db(test);

      args = test.args();
      (empty ? args.rows : args.db_stride) = 0;
      args.dy = args.p = nullptr;
      args.dy_stride = -1;
      if (!empty) args.db = nullptr;
      REQUIRE(run(test, args) == NF4_STATUS_OK);
      CHECK(test.db.buffer.untouched());
      expected.check_da(test);
      CHECK(test.surroundings_intact());

      args.da = nullptr;
      REQUIRE(run(test, args) == NF4_STATUS_OK);
      CHECK(test.da.buffer.untouched());
    }
  }
}
