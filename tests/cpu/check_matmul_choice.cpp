// The kernel configuration of 5000 random products on nine GPUs, and the plans of those for wgmma,
// as measured and released. A change of the cost model or of what a kernel can run shows here,
// without a GPU.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "support/catch.hpp"
#include "support/choice_checks.hpp"
#include "support/choice_table.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

std::string name_of(char config, char cluster_size) {
  return std::string(cuda::kMatmulConfigs[config - 'a'].name) + ", a tile shared by " +
         cluster_size;
}

}  // namespace

TEST_CASE("the choice of matmul's kernel", "[matmul]") {
  const std::string_view expected = kChoiceTable;
  REQUIRE(expected.size() == 2 * kChoiceCases);
  ChoiceCases cases;
  NumberHash plans;
  for (int i = 0; i < kChoiceCases; ++i) {
    const ChoiceCases::Case test = cases.next();
    cuda::GpuFacts gpu = facts_of(*test.gpu);
    const auto load = [&](cuda::GpuFacts &facts) {
      std::copy_n(test.gpu->resident_clusters, cuda::kMaxClusterSize + 1, facts.resident_clusters);
      return 0;
    };
    cuda::MatmulChoice choice{};
    REQUIRE(cuda::choose_config(test.problem, gpu, cuda::cost_model(), load, choice) == 0);
    const Weight &weight = test.problem.weight;
    INFO("product " << i << ": " << test.problem.m << " rows of x, " << weight.rows << " x "
                    << weight.cols << " on compute capability " << test.gpu->compute_capability);
    const int size = cuda::is_wgmma(choice.config) ? choice.plan.cluster_size : 1;
    if (cuda::is_wgmma(choice.config)) plans.add(choice.plan);
    if (cuda::is_stream_k(choice.config)) CHECK((size == 1) == (choice.plan.stream_k_tiles > 0));
    check_stream_k_fits(test.problem, gpu);
    check_stream_k_fits(cuda::transposed(test.problem), gpu);
    CHECK(name_of(static_cast<char>('a' + choice.config), static_cast<char>('0' + size)) ==
          name_of(expected[2 * i], expected[2 * i + 1]));
    CHECK(cuda::can_run(test.problem, gpu, choice.config));
  }
  CHECK(plans.value() == kChoicePlans);
}

TEST_CASE("CTAs of the gradient's stream-K kernels, and beside an adapter's product", "[matmul]") {
  cuda::GpuFacts gpu{};
  gpu.multiprocessors = 132;
  const int config = cuda::config_named("wgmma_256x128_stream_k");
  const auto clusters = [&](int64_t rows) {
    const cuda::MatmulSize size{NF4_DTYPE_BF16, 256, rows, 14336, 64, cuda::WgmmaSet::kGrad};
    return cuda::plan_wgmma(size, gpu, cuda::cost_model(cuda::TransposedWeight{}), config).clusters;
  };
  CHECK(clusters(4096) == 128);   // 4 for each of 32 tiles
  CHECK(clusters(11520) == 132);  // 90 tiles
  const int resident[] = {0, 0, 66, 39, 30};
  std::copy(std::begin(resident), std::end(resident), gpu.resident_clusters);
  cuda::leave_multiprocessors(4, gpu);
  CHECK(gpu.multiprocessors == 128);
  CHECK(gpu.resident_clusters[2] == 64);
  CHECK(gpu.resident_clusters[3] == 37);
  CHECK(gpu.resident_clusters[4] == 29);
}
