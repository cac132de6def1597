// The kernel configuration of random products of integer weights on nine GPUs: each can run what it
// is chosen for, and what no fast kernel takes goes to kMma64x64.
#include <algorithm>
#include <cstdint>

#include "cuda/matmul/workspace.hpp"
#include "support/catch.hpp"
#include "support/choice_checks.hpp"
#include "support/choice_table.hpp"
#include "support/random.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kCases = 4000;

template <class T>
T *at(Rng &rng) {
  // Aligned, but for one in sixteen.
  return reinterpret_cast<T *>(0x7f0000000000 + 16 * rng.below(1 << 20) + (rng.one_in(16) ? 4 : 0));
}

Int4MatmulProblem random_problem(Rng &rng) {
  constexpr nf4_int4_layout kLayouts[] = {NF4_INT4_GPTQ, NF4_INT4_AWQ, NF4_INT4_COMPRESSED_TENSORS};
  constexpr int64_t kSizes[] = {512, 1024, 2048, 4096, 5120, 8192, 14336, 28672};
  constexpr int64_t kGroups[] = {32, 64, 128, 128, 128, 192};
  constexpr int64_t kUpTo[] = {4, 20, 100, 400, 2000, 10000};
  Int4MatmulProblem problem{};
  Int4Weight &weight = problem.weight;
  weight.layout = rng.pick(kLayouts);
  weight.scales_dtype = rng.one_in(2) ? NF4_DTYPE_FP16 : NF4_DTYPE_BF16;
  weight.group_size = rng.pick(kGroups);
  weight.cols = rng.one_in(2) ? rng.pick(kSizes) / 64 * weight.group_size
                              : rng.between(1, 200) * weight.group_size;
  if (rng.one_in(8)) weight.group_size = weight.cols;
  weight.rows = rng.one_in(2) ? rng.pick(kSizes) : 8 * rng.between(1, 2000);
  weight.elements = weight.rows * weight.cols;
  weight.groups = weight.cols / weight.group_size;
  weight.packed = at<uint32_t>(rng);
  weight.scales = at<void>(rng);
  if (rng.one_in(2)) weight.zeros = at<uint32_t>(rng);
  if (rng.one_in(6)) weight.g_idx = at<int32_t>(rng);
  if (rng.one_in(6)) weight.permutation = at<int32_t>(rng);
  problem.dtype = rng.one_in(2) ? NF4_DTYPE_BF16 : NF4_DTYPE_FP16;
  problem.m = rng.between(1, rng.pick(kUpTo));
  problem.x = at<void>(rng);
  problem.x_stride = weight.cols + (rng.one_in(8) ? rng.below(64) : 0);
  problem.y = at<void>(rng);
  problem.y_stride = weight.rows;
  return problem;
}

cuda::MatmulChoice choose(const Int4MatmulProblem &problem, const ChoiceGpu &gpu) {
  cuda::GpuFacts facts = facts_of(gpu);
  const auto load = [&](cuda::GpuFacts &loaded) {
    std::copy_n(gpu.resident_clusters, cuda::kMaxClusterSize + 1, loaded.resident_clusters);
    return 0;
  };
  cuda::MatmulChoice choice{};
  REQUIRE(cuda::choose_config(problem, facts, cuda::cost_model(problem.weight), {}, load, choice) ==
          0);
  return choice;
}

}  // namespace

TEST_CASE("the choice of matmul's kernel for integer weights can run the product",
          "[matmul][int4]") {
  NumberHash choices;
  for (int i = 0; i < kCases; ++i) {
    Rng rng(0x1e000000 + i);
    const Int4MatmulProblem problem = random_problem(rng);
    const Int4Weight &weight = problem.weight;
    for (const ChoiceGpu &gpu : kChoiceGpus) {
      INFO("product " << i << ": " << problem.m << " rows of x, " << weight.rows << " x "
                      << weight.cols << ", layout " << weight.layout << ", group_size "
                      << weight.group_size << " on compute capability " << gpu.compute_capability);
      const cuda::MatmulChoice choice = choose(problem, gpu);
      const bool wgmma = cuda::is_wgmma(choice.config);
      choices.add(choice.config);
      if (wgmma) choices.add(choice.plan);
      REQUIRE(cuda::can_run(problem, facts_of(gpu), choice.config));
      // Turing has kernels of fp16 alone, and none of AWQ.
      const bool turing = gpu.compute_capability < 80 && problem.dtype == NF4_DTYPE_FP16 &&
                          weight.layout != NF4_INT4_AWQ;
      if (weight.g_idx != nullptr || (gpu.compute_capability < 80 && !turing))
        REQUIRE(choice.config == cuda::kMma64x64);
      REQUIRE((!wgmma || gpu.compute_capability == 90));
      check_stream_k_fits(problem, facts_of(gpu));
      if (!wgmma) continue;
      REQUIRE(choice.plan.n_tiles * cuda::kMatmulConfigs[choice.config].tile_n >= weight.rows);
      REQUIRE(choice.plan.m_tiles * cuda::kMatmulConfigs[choice.config].tile_m >= problem.m);
    }
  }
  // As measured and released: a change of the cost model shows here.
  CHECK(choices.value() == kInt4Choices);
}

// Aligned weights as checkpoints have them.
TEST_CASE("integer weights in groups of 64 and more take the fast kernels of Hopper",
          "[matmul][int4]") {
  for (const nf4_int4_layout layout : {NF4_INT4_GPTQ, NF4_INT4_AWQ, NF4_INT4_COMPRESSED_TENSORS})
    for (const int64_t group_size : {64, 128, 256, 4096})
      for (const int64_t m : {17, 64, 100, 256, 1024, 4096}) {
        Int4MatmulProblem problem{};
        Int4Weight &weight = problem.weight;
        weight.layout = layout;
        weight.scales_dtype = NF4_DTYPE_FP16;
        weight.rows = weight.cols = 4096;
        weight.elements = weight.rows * weight.cols;
        weight.group_size = group_size;
        weight.groups = weight.cols / group_size;
        problem.dtype = NF4_DTYPE_BF16;
        problem.m = m;
        problem.x_stride = weight.cols;
        problem.y_stride = weight.rows;
        INFO("layout " << layout << ", group_size " << group_size << ", m " << m);
        CHECK(cuda::is_wgmma(choose(problem, kChoiceGpus[0]).config));
      }
}

TEST_CASE("integer weights in groups of 64 and more take the multistage kernels before Hopper",
          "[matmul][int4]") {
  for (const nf4_int4_layout layout : {NF4_INT4_GPTQ, NF4_INT4_AWQ, NF4_INT4_COMPRESSED_TENSORS})
    for (const int64_t group_size : {32, 64, 96, 192, 256, 4096})
      for (const int64_t rows : {4100, 4104, 4096, 4095})
        for (const int64_t m : {17, 32, 64, 4096})
          for (const ChoiceGpu &gpu : kChoiceGpus) {
            if (gpu.compute_capability < 80 || gpu.compute_capability == 90) continue;
            Int4MatmulProblem problem{};
            Int4Weight &weight = problem.weight;
            weight.layout = layout;
            weight.scales_dtype = NF4_DTYPE_BF16;
            weight.rows = rows;
            weight.group_size = group_size;
            weight.cols = group_size * 64;
            weight.elements = weight.rows * weight.cols;
            weight.groups = 64;
            problem.dtype = NF4_DTYPE_FP16;
            problem.m = m;
            problem.x_stride = weight.cols;
            problem.y_stride = weight.rows;
            const bool whole_rows = layout == NF4_INT4_AWQ    ? rows % 32 == 0
                                    : layout == NF4_INT4_GPTQ ? rows % 4 == 0
                                                              : true;
            INFO("layout " << layout << ", group_size " << group_size << ", " << rows << " rows, m "
                           << m << " on compute capability " << gpu.compute_capability);
            const int config = choose(problem, gpu).config;
            REQUIRE(config == (whole_rows && group_size % 64 == 0 ? cuda::multistage_config(m)
                                                                  : cuda::kMma64x64));
          }
}

TEST_CASE("large integer weights take the multistage kernels from 9 rows of x on, without TMA",
          "[matmul][int4]") {
  for (const int64_t rows : {2048, 4096, 14336})
    for (const int64_t m : {8, 9, 16})
      for (const ChoiceGpu &gpu : kChoiceGpus) {
        if (gpu.compute_capability < 80 || gpu.compute_capability >= 90) continue;
        Int4MatmulProblem problem{};
        Int4Weight &weight = problem.weight;
        weight.layout = NF4_INT4_GPTQ;
        weight.scales_dtype = problem.dtype = NF4_DTYPE_FP16;
        weight.rows = rows;
        weight.cols = 4096;
        weight.elements = weight.rows * weight.cols;
        weight.group_size = 128;
        weight.groups = 32;
        problem.m = m;
        problem.x_stride = weight.cols;
        problem.y_stride = weight.rows;
        INFO(rows << " rows, m " << m << " on compute capability " << gpu.compute_capability);
        const int config = choose(problem, gpu).config;
        REQUIRE(cuda::is_multistage(config) == (rows >= 4096 && m >= 9));
        REQUIRE((cuda::is_multistage(config) || cuda::is_skinny(config)));
      }
}

TEST_CASE("stream-K kernels of integer weights have a workspace, where there are any",
          "[matmul][int4]") {
  Int4MatmulProblem problem{};
  Int4Weight &weight = problem.weight;
  weight.layout = NF4_INT4_GPTQ;
  weight.scales_dtype = problem.dtype = NF4_DTYPE_BF16;
  weight.rows = weight.cols = weight.group_size = 14336;
  weight.elements = weight.rows * weight.cols;
  weight.groups = 1;
  problem.x_stride = problem.y_stride = 14336;
  int64_t before = 0;
  for (problem.m = 1; problem.m <= 1000; ++problem.m) {
    INFO("m " << problem.m);
    const int64_t bytes = cuda::MatmulWorkspace(problem).bytes();
    REQUIRE(bytes >= before);
    before = bytes;
    bool any = false;
    for (int config = cuda::kFirstStreamK; config < cuda::kFirstMultistage; ++config)
      any |= cuda::can_run(problem, facts_of(kChoiceGpus[0]), config);
    REQUIRE(any == (bytes != 0));
  }
  // The sums of the multistage kernels take the most.
  CHECK(before == cuda::MatmulWorkspace::kMaxMultistageCtas * int64_t{16 * 8 + 128 * 256 * 4});
}

TEST_CASE("integer weights in groups of 64 and more take the skinny kernels for few rows of x",
          "[matmul][int4]") {
  for (const nf4_int4_layout layout : {NF4_INT4_GPTQ, NF4_INT4_AWQ, NF4_INT4_COMPRESSED_TENSORS})
    for (const int64_t group_size : {32, 64, 128, 4096})
      for (int64_t m = 1; m <= 8; ++m) {
        Int4MatmulProblem problem{};
        Int4Weight &weight = problem.weight;
        weight.layout = layout;
        weight.scales_dtype = NF4_DTYPE_FP16;
        weight.rows = weight.cols = 4096;
        weight.elements = weight.rows * weight.cols;
        weight.group_size = group_size;
        weight.groups = weight.cols / group_size;
        problem.dtype = NF4_DTYPE_BF16;
        problem.m = m;
        problem.x_stride = weight.cols;
        problem.y_stride = weight.rows;
        INFO("layout " << layout << ", group_size " << group_size << ", " << m << " rows of x");
        REQUIRE(cuda::is_skinny(choose(problem, kChoiceGpus[0]).config) == (group_size >= 64));
      }
}
