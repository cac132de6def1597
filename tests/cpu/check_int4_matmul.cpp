// The shapes of integer weights that are multiplied on the CPU: every variant that this machine
// runs against a naive matmul in binary64, with guard pages around every buffer.
#include <deque>
#include <vector>

#include "support/cpu_matmul.hpp"
#include "support/some_of.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kShapes = 14;  // per class

Int4MatmulCase case_of(Rng &rng, const Int4Class &kind, const Int4Shape &shape, nf4_dtype dtype,
                       int64_t m, XKind x) {
  return random_int4_matmul_case(rng, kind, shape, dtype, m, x, true);
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
        const auto test =
            case_of(rng, kind, shape, rng.pick(kDtypes), random_m(rng), rng.pick(kKinds));
        INFO(describe(test, stream));
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
        const auto test = case_of(rng, kind, {8, 14336, 128}, dtype, m, XKind::kOrdinary);
        INFO(describe(test, stream));
        check_matmul(test, rng);
      }
}

TEST_CASE("long rows of scattered groups are multiplied, too", "[matmul]") {
  uint64_t stream = 0x1d000000;
  size_t kinds = 0;
  for (const ColumnOrder order : kColumnOrders)
    for (const Int4Class &kind : int4_classes(order)) {
      const Int4Shape shape =
          one_of<Int4Shape>({{136, 2304, 128}, {40, 5120, 64}, {24, 4608, 8}}, kinds++);
      Rng rng(++stream);
      const auto test =
          case_of(rng, kind, shape, rng.pick(kDtypes), rng.between(1, 20), XKind::kOrdinary);
      INFO(describe(test, stream));
      check_matmul(test, rng);
    }
}

TEST_CASE("very few rows of x and scattered groups are multiplied, too", "[matmul]") {
  uint64_t stream = 0x1e000000;
  size_t kinds = 0;
  for (const ColumnOrder order : {ColumnOrder::kGIdx, ColumnOrder::kAnyGIdx, ColumnOrder::kBoth})
    for (const Int4Class &kind : int4_classes(order)) {
      const Int4Shape shape =
          one_of<Int4Shape>({{200, 2304, 128}, {72, 16640, 128}, {16, 1024, 8}}, kinds++);
      for (const int64_t m : {1, 2}) {
        Rng rng(++stream);
        const auto test = case_of(rng, kind, shape, rng.pick(kDtypes), m, XKind::kOrdinary);
        INFO(describe(test, stream));
        check_matmul(test, rng);
      }
    }
}

TEST_CASE("many rows of integer weights are multiplied, too", "[matmul]") {
  uint64_t stream = 0x18000000;
  for (const Int4Class &kind : int4_classes())
    for (const int64_t m : {1, 4, 11}) {
      Rng rng(++stream);
      const auto test = case_of(rng, kind, {2200, 64, 64}, rng.pick(kDtypes), m, XKind::kOrdinary);
      INFO(describe(test, stream));
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
        const auto test = case_of(rng, kind, {24, 4096, 128}, dtype, m, XKind::kOrdinary);
        INFO(describe(test, stream));
        check_error(test, kLargestError[dtype - 1], rng);
      }
}

TEST_CASE("the number of threads changes no bit of a matmul of integer weights", "[matmul]") {
  Rng rng(0x1a000000);
  size_t kinds = 0;
  for (const nf4_int4_layout layout : kInt4Layouts)
    for (const nf4_dtype dtype : kDtypes)
      for (const int64_t m : some_of<int64_t>({1, 3, 21}, kinds++)) {
        const Int4Class kind{layout, NF4_DTYPE_FP16, true, 0};
        check_thread_counts(case_of(rng, kind, {1504, 256, 128}, dtype, m, XKind::kOutliers), rng);
      }
}

TEST_CASE("a batch of integer weights is as many matmuls, to the bit", "[matmul]") {
  Rng rng(0x1b000000);
  for (const nf4_dtype dtype : kDtypes) {
    std::deque<Int4MatmulCase> tests;
    std::deque<CpuMatmul<HostInt4Weight>> one, all;
    std::vector<const nf4_int4_tensor *> weights;
    std::vector<nf4_matmul_args> args;
    for (const nf4_int4_layout layout : kInt4Layouts) {
      const Int4MatmulCase &test = tests.emplace_back(
          case_of(rng, {layout, NF4_DTYPE_FP16, true, 0}, random_int4_shape(rng, layout), dtype,
                  rng.between(1, 12), XKind::kOrdinary));
      REQUIRE(one.emplace_back(rng, test).multiply(2) == NF4_STATUS_OK);
      all.emplace_back(rng, test);
      weights.push_back(&all.back().weight.tensor());
      args.push_back(all.back().args());
    }
    REQUIRE(nf4_int4_matmul_batch_cpu(weights.data(), args.data(), tests.size(), 2) ==
            NF4_STATUS_OK);
    for (size_t i = 0; i < tests.size(); ++i) CHECK(one[i].bytes() == all[i].bytes());
  }
}

TEST_CASE("empty matmuls of integer weights: nothing, the bias, or 0", "[matmul]") {
  Rng rng(0x1c000000);
  for (const Int4Class &kind : int4_classes())
    for (const MatmulShape shape :
         {MatmulShape{16, 64, 0}, MatmulShape{0, 64, 3}, MatmulShape{16, 0, 3}}) {
      const auto test = case_of(rng, kind, {shape.rows, shape.cols, -1}, rng.pick(kDtypes), shape.m,
                                XKind::kOrdinary);
      INFO(describe(test, 0x1c000000));
      check_matmul(test, rng);
    }
}
