// The kernel configuration of 5000 random products on nine GPUs, and the plans of those for wgmma,
// as measured and released. A change of the cost model or of what a kernel can run shows here,
// without a GPU.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "cuda/matmul/beside_lora.hpp"
#include "cuda/matmul/skinny/smem.hpp"
#include "support/catch.hpp"
#include "support/choice_checks.hpp"
#include "support/choice_table.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

std::string name_of(char config, char cluster_size) {
  return std::string(cuda::kMatmulConfigs[config_of(config)].name) + ", a tile shared by " +
         cluster_size;
}

cuda::WeightView weight_of_14336_columns(bool nested) {
  cuda::WeightView weight{};
  weight.cols = 14336;
  weight.blocksize_log2 = 6;
  weight.nested_blocksize_log2 = nested ? 8 : -1;
  return weight;
}

}  // namespace

TEST_CASE("the choice of matmul's kernel", "[matmul]") {
  const std::string_view expected = kChoiceTable;
  REQUIRE(expected.size() == 2 * kChoiceCases);
  ChoiceCases cases;
  NumberHash plans;
  std::string chosen;
  for (int i = 0; i < kChoiceCases; ++i) {
    const ChoiceCases::Case test = cases.next();
    cuda::GpuFacts gpu = facts_of(*test.gpu);
    const auto load = [&](cuda::GpuFacts &facts) {
      std::copy_n(test.gpu->resident_clusters, cuda::kMaxClusterSize + 1, facts.resident_clusters);
      return 0;
    };
    cuda::MatmulChoice choice{};
    REQUIRE(cuda::choose_config(test.problem, gpu, cuda::cost_model(), {}, load, choice) == 0);
    const Weight &weight = test.problem.weight;
    INFO("product " << i << ": " << test.problem.m << " rows of x, " << weight.rows << " x "
                    << weight.cols << " on compute capability " << test.gpu->compute_capability);
    const int size = cuda::is_wgmma(choice.config) ? choice.plan.cluster_size : 1;
    if (cuda::is_wgmma(choice.config)) {
      plans.add(choice.plan);
      if (cuda::is_stream_k(choice.config)) CHECK((size == 1) == (choice.plan.stream_k_tiles > 0));
    }
    check_stream_k_fits(test.problem, gpu);
    check_stream_k_fits(cuda::transposed(test.problem), gpu);
    chosen += {letter_of(choice.config), static_cast<char>('0' + size)};
    CHECK(name_of(chosen[2 * i], chosen[2 * i + 1]) ==
          name_of(expected[2 * i], expected[2 * i + 1]));
    CHECK(cuda::can_run(test.problem, gpu, choice.config));
  }
  CHECK(chosen == expected);  // the failure shows the new table
  CHECK(plans.value() == kChoicePlans);
}

TEST_CASE("skinny kernels have a layout that fits the GPU", "[matmul]") {
  for (const ChoiceGpu &gpu : kChoiceGpus) {
    const cuda::GpuFacts facts = facts_of(gpu);
    if (!facts.tensor_cores) {
      for (const int max_m : {2, 8, 16})
        for (const bool nested : {false, true}) {
          INFO("compute capability " << gpu.compute_capability << ", " << max_m << " rows of x");
          CHECK(cuda::skinny_layout_index(NF4_DTYPE_FP16, max_m, facts) == cuda::kTuringSkinny);
          const cuda::SkinnySmem smem = cuda::skinny_smem(
              cuda::skinny_layout(NF4_DTYPE_FP16, max_m, facts), max_m, facts.tensor_maps);
          CHECK(cuda::skinny_tiles_that_fit(
                    smem, cuda::skinny_scale_bytes(weight_of_14336_columns(nested)),
                    gpu.shared_bytes) > 0);
        }
      continue;
    }
    const bool much = gpu.shared_bytes > 99 << 10;
    for (const nf4_dtype dtype : {NF4_DTYPE_FP32, NF4_DTYPE_FP16, NF4_DTYPE_BF16})
      for (const int max_m : {2, 8, 16})
        for (const bool nested : {false, true}) {
          INFO("compute capability " << gpu.compute_capability << ", dtype " << dtype << ", "
                                     << max_m << " rows of x");
          const bool fp32 = dtype == NF4_DTYPE_FP32;
          const int index = cuda::skinny_layout_index(dtype, max_m, facts);
          const bool narrow = !fp32 && (!much || (max_m == 16 && !facts.tensor_maps));
          CHECK(index == (narrow ? cuda::kNarrowSkinny : cuda::kWideSkinny));
          const cuda::SkinnySmem smem =
              cuda::skinny_smem(cuda::skinny_layout(dtype, max_m, facts), max_m, facts.tensor_maps);
          const int64_t tiles = cuda::skinny_tiles_that_fit(
              smem, cuda::skinny_scale_bytes(weight_of_14336_columns(nested)), gpu.shared_bytes);
          CHECK((tiles > 0) == (much || !fp32));
        }
  }
}

TEST_CASE("CTAs of the gradient's stream-K kernels, and beside an adapter's product", "[matmul]") {
  cuda::GpuFacts gpu{};
  gpu.multiprocessors = 132;
  const int config = cuda::config_named("wgmma_256x128_stream_k");
  const auto clusters = [&](int64_t rows) {
    const cuda::MatmulSize size{NF4_DTYPE_BF16, 256, rows,
                                14336,          64,  cuda::WeightKind::kTransposed};
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

TEST_CASE("a gradient loads wgmma kernels only where one may be chosen", "[matmul]") {
  cuda::GpuFacts gpu{};
  gpu.multiprocessors = 132;
  gpu.wgmma = gpu.tensor_cores = gpu.tensor_maps = true;
  gpu.shared_bytes = 227 << 10;
  MatmulProblem problem{};
  problem.gradient = true;
  problem.dtype = NF4_DTYPE_BF16;
  problem.weight.rows = problem.weight.cols = 4096;
  problem.weight.elements = 4096 * 4096;
  problem.weight.blocksize_log2 = 6;
  problem.weight.nested_blocksize_log2 = -1;
  problem.weight.blocks = problem.weight.elements / 64;
  problem.x_stride = problem.y_stride = 4096;
  const auto check = [&](int64_t m, const char *prefix, int expected_loads) {
    problem.m = m;
    int loads = 0;
    const auto load = [&](cuda::GpuFacts &) {
      ++loads;
      return 0;
    };
    const cuda::GradProblem grad = cuda::transposed(problem);
    cuda::MatmulChoice choice{};
    REQUIRE(cuda::choose_config(grad, gpu, cuda::cost_model(grad.weight), {}, load, choice) == 0);
    INFO("m " << m << ": " << cuda::kMatmulConfigs[choice.config].name);
    CHECK(std::string_view(cuda::kMatmulConfigs[choice.config].name).rfind(prefix, 0) == 0);
    CHECK(loads == expected_loads);
  };
  check(1, "skinny_8", 0);
  check(8, "skinny_8", 0);
  check(9, "skinny_16", 0);
  check(16, "skinny_16", 0);
  check(17, "wgmma_", 1);
}

TEST_CASE("a gradient runs multistage kernels where there is no wgmma, if they can", "[matmul]") {
  cuda::GpuFacts gpu{};
  gpu.multiprocessors = 58;
  gpu.tensor_cores = true;
  gpu.shared_bytes = 99 << 10;
  MatmulProblem problem{};
  const auto name = [&](auto change) {
    problem.gradient = true;
    problem.dtype = NF4_DTYPE_BF16;
    problem.m = 100;
    problem.weight.rows = 1024;
    problem.weight.cols = 192;
    problem.weight.elements = 1024 * 192;
    problem.weight.blocksize_log2 = 6;
    problem.weight.nested_blocksize_log2 = -1;
    problem.weight.blocks = problem.weight.elements / 64;
    problem.weight.absmax = nullptr;
    problem.x = nullptr;
    problem.x_stride = 1024;
    cuda::GpuFacts facts = gpu;
    change(facts);
    const cuda::GradProblem grad = cuda::transposed(problem);
    cuda::MatmulChoice choice{};
    const auto load = [](cuda::GpuFacts &) { return 0; };
    REQUIRE(cuda::choose_config(grad, facts, cuda::cost_model(grad.weight), {}, load, choice) == 0);
    return std::string(cuda::kMatmulConfigs[choice.config].name);
  };
  using Facts = cuda::GpuFacts;
  CHECK(name([](Facts &) {}) == "multistage_128x256");
  CHECK(name([&](Facts &) { problem.m = 1; }) == "multistage_16x256");
  CHECK(name([&](Facts &) { problem.m = 33; }) == "multistage_64x256");
  CHECK(name([&](Facts &) { problem.dtype = NF4_DTYPE_FP16; }) == "multistage_128x256");
  CHECK(name([&](Facts &) { problem.weight.blocksize_log2 = 12; }) == "multistage_128x256");
  // The scales of a K-tile and the stages of the widest tile fill 99 KiB, the next tile is smaller.
  CHECK(name([](Facts &facts) { facts.shared_bytes = (99 << 10) - 1; }) ==
        cuda::kMatmulConfigs[cuda::kMatmulConfigCount - 2].name);
  CHECK(name([&](Facts &facts) {
          facts.tensor_cores = false;
          facts.fp16_tensor_cores = true;
          problem.dtype = NF4_DTYPE_FP16;
        }) == "mma_64x64");
  CHECK(name([&](Facts &) { problem.dtype = NF4_DTYPE_FP32; }) == "mma_64x64");
  CHECK(name([&](Facts &) { problem.weight.rows = 1000; }) == "mma_64x64");
  CHECK(name([&](Facts &) { problem.weight.cols = 160; }) == "mma_64x64");
  CHECK(name([&](Facts &) { problem.weight.blocksize_log2 = 5; }) == "mma_64x64");
  CHECK(name([&](Facts &) { problem.weight.blocks = INT32_MAX - 128 * 192 + 1; }) == "mma_64x64");
  CHECK(name([&](Facts &) { problem.x_stride = 1028; }) == "mma_64x64");
  // The skinny kernels read two blocks' scales at a time.
  const auto few_rows = [&](uintptr_t absmax, int nested_blocksize_log2) {
    return name([&](Facts &facts) {
      facts.tensor_maps = true;
      facts.shared_bytes = 227 << 10;
      problem.m = 8;
      problem.weight.cols = 256;
      problem.weight.elements = 1024 * 256;
      problem.weight.blocks = problem.weight.elements / 64;
      problem.weight.absmax = reinterpret_cast<void *>(absmax);
      problem.weight.nested_blocksize_log2 = nested_blocksize_log2;
    });
  };
  CHECK(few_rows(8, -1) == "skinny_8");
  CHECK(few_rows(4, -1) == "multistage_16x256");
  CHECK(few_rows(2, 8) == "skinny_8");
  CHECK(few_rows(1, 8) == "multistage_16x256");
}

TEST_CASE("a plan is late by CTAs that start late, if they have as many tiles as any", "[matmul]") {
  const auto delay = [](int64_t tiles, int64_t stream_k_tiles, int cluster_size = 1) {
    cuda::WgmmaPlan plan{};
    plan.n_tiles = tiles;
    plan.m_tiles = 1;
    plan.stream_k_tiles = stream_k_tiles;
    plan.clusters = std::min<int64_t>(tiles, 132 / cluster_size);
    plan.cluster_size = cluster_size;
    plan.cycles = 3000;
    return cuda::delay_of(plan, 132, 8, 2000);
  };
  CHECK(delay(124, 0) == 0);     // the late ones have none
  CHECK(delay(125, 0) == 2000);  // one of them has one
  CHECK(delay(2 * 132, 0) == 2000);
  CHECK(delay(132 + 124, 0) == 500);  // a tile less, of 1500 cycles
  CHECK(delay(132 + 124, 124) == 2000);
  CHECK(delay(62, 0, 2) == 0);
  CHECK(delay(63, 0, 2) == 2000);
}

TEST_CASE("a choice beside an adapter's product: for all multiprocessors, or for those it leaves",
          "[matmul]") {
  cuda::GpuFacts gpu{};
  gpu.multiprocessors = 132;
  gpu.wgmma = gpu.tensor_cores = gpu.tensor_maps = true;
  gpu.shared_bytes = 227 << 10;
  const cuda::CostModel &model = cuda::cost_model(cuda::TransposedWeight{});
  const auto clusters = [&](int64_t m, int64_t cols, int ctas, double cycles) {
    MatmulProblem problem{};
    problem.gradient = true;
    problem.dtype = NF4_DTYPE_BF16;
    problem.m = m;
    problem.weight.rows = 4096;
    problem.weight.cols = cols;
    problem.weight.elements = 4096 * cols;
    problem.weight.blocksize_log2 = 6;
    problem.weight.nested_blocksize_log2 = -1;
    problem.weight.blocks = problem.weight.elements / 64;
    problem.x_stride = 4096;
    const cuda::GradProblem transposed = cuda::transposed(problem);
    cuda::MatmulChoice choice{cuda::kMma64x64, {}};
    cuda::choose_wgmma(transposed, gpu, model, {}, choice);
    cuda::choose_beside_lora(transposed, ctas, cycles, gpu, model, {}, choice);
    return choice.plan.clusters;
  };
  CHECK(clusters(1536, 4096, 0, 0) == 132);
  CHECK(clusters(1536, 4096, 8, 33000) == 124);
  CHECK(clusters(1536, 4096, 8, 100) == 132);    // sooner than with fewer
  CHECK(clusters(2048, 4096, 8, 44000) == 132);  // 512 tiles: the last ones have one less
}
