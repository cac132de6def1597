// How integer weights are divided into strips: each row and K-tile has a place, clusters are
// resident and leave no warp without columns, and known products keep their plans.
#include <cstdint>

#include "cuda/matmul/skinny/strip_plan.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

cuda::GpuFacts facts_of(int multiprocessors) {
  cuda::GpuFacts facts{};
  facts.multiprocessors = multiprocessors;
  facts.tensor_maps = true;
  return facts;
}

void check_plan(nf4_int4_layout layout, int64_t rows, int64_t cols, int warps_n, int cluster) {
  INFO("layout " << layout << ", " << rows << " x " << cols);
  const cuda::StripPlan plan = cuda::plan_strips(layout, rows, cols, facts_of(132));
  CHECK(plan.warps_n == warps_n);
  CHECK(plan.cluster == cluster);
}

}  // namespace

TEST_CASE("strips hold all rows, and clusters all columns", "[matmul][int4]") {
  Rng rng(0x57a1);
  for (int i = 0; i < 20000; ++i) {
    const nf4_int4_layout layout = rng.one_in(2) ? NF4_INT4_GPTQ : NF4_INT4_AWQ;
    const int64_t rows = 32 * rng.between(1, rng.one_in(2) ? 100 : 2000);
    const int64_t cols = 64 * rng.between(1, 500);
    const cuda::GpuFacts gpu = facts_of(static_cast<int>(rng.between(20, 160)));
    const cuda::StripPlan plan = cuda::plan_strips(layout, rows, cols, gpu);
    INFO(rows << " x " << cols << ", layout " << layout << ", " << gpu.multiprocessors
              << " multiprocessors");
    REQUIRE(
        (plan.warps_n == cuda::narrow_strip(layout) || plan.warps_n == cuda::wide_strip(layout)));
    REQUIRE(plan.strips * plan.rows() >= rows);
    REQUIRE((plan.strips - 1) * plan.rows() < rows);
    REQUIRE(plan.cluster >= 1);
    REQUIRE(plan.cluster <= cuda::kMaxClusterSize);
    if (plan.cluster == 1) continue;
    REQUIRE(plan.strips * plan.cluster <= gpu.multiprocessors);
    REQUIRE(plan.cluster * cuda::strip_warps_k(plan.warps_n) <= cols / cuda::kStripK);
  }
}

// As measured on an H200 (docs/design/matmul-skinny.md).
TEST_CASE("strips of known products", "[matmul][int4]") {
  check_plan(NF4_INT4_GPTQ, 4096, 4096, 1, 2);
  check_plan(NF4_INT4_GPTQ, 4096, 14336, 1, 2);
  check_plan(NF4_INT4_GPTQ, 14336, 4096, 2, 1);
  check_plan(NF4_INT4_AWQ, 4096, 4096, 4, 6);
  check_plan(NF4_INT4_AWQ, 4096, 14336, 4, 6);
  check_plan(NF4_INT4_AWQ, 14336, 4096, 2, 1);
}
