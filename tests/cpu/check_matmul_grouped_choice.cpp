// Which kernel a grouped product takes, without a GPU.
#include <cstdint>
#include <string>

#include "cuda/matmul_grouped/choose.hpp"
#include "cuda/matmul_grouped/wgmma_configs.hpp"
#include "support/catch.hpp"

using namespace nf4;

namespace {

constexpr cuda::GpuFacts kH200{132, 232448, true, true, true, {}};
constexpr cuda::GpuFacts kA100{108, 166912, true, false, false, {}};
constexpr cuda::GpuFacts kT4{40, 65536, false, false, false, {}};

// Pointers are numbers: nothing is read through them.
template <class T = void>
T *at(uintptr_t address) {
  return reinterpret_cast<T *>(address);
}

GroupedProblem product(int32_t experts, int64_t expert_rows, int64_t cols, int64_t m) {
  GroupedProblem problem{};
  Weight &weight = problem.weight;
  weight.format = NF4_FORMAT_NF4;
  weight.rows = experts * expert_rows;
  weight.cols = cols;
  weight.elements = weight.rows * cols;
  weight.blocksize_log2 = 6;
  weight.nested_blocksize_log2 = 8;
  weight.blocks = weight.elements / 64;
  weight.packed = at<uint8_t>(4096);
  weight.absmax = at(4096);
  problem.dtype = NF4_DTYPE_BF16;
  problem.experts = experts;
  problem.m = m;
  problem.x = at(4096);
  problem.x_stride = cols;
  problem.x_rows = m;
  problem.y = at(4096);
  problem.y_stride = expert_rows;
  return problem;
}

std::string chosen(const GroupedProblem &problem, const cuda::GpuFacts &gpu) {
  return cuda::kMatmulConfigs[cuda::choose_grouped(problem, gpu)].name;
}

// gate_up of Qwen3-30B-A3B, by tokens.
GroupedProblem qwen(int64_t tokens) { return product(128, 1536, 2048, tokens * 8); }

}  // namespace

TEST_CASE("grouped products take the kernel that was measured to be fastest", "[matmul]") {
  CHECK(chosen(qwen(1), kH200) == "skinny_2");
  CHECK(chosen(qwen(8), kH200) == "skinny_2");
  CHECK(chosen(qwen(64), kH200) == "skinny_8");
  CHECK(chosen(qwen(256), kH200) == "wgmma_32x256");
  CHECK(chosen(qwen(512), kH200) == "wgmma_64x256");
  CHECK(chosen(qwen(2048), kH200) == "wgmma_152x128");
  CHECK(chosen(qwen(4096), kH200) == "wgmma_304x128");
  CHECK(chosen(product(8, 28672, 4096, 2), kH200) == "skinny_2");
  CHECK(chosen(product(8, 28672, 4096, 32), kH200) == "skinny_8");
  CHECK(chosen(product(8, 28672, 4096, 2048), kH200) == "wgmma_304x128");
  CHECK(chosen(product(8, 28672, 4096, 8192), kH200) == "wgmma_304x128");
  CHECK(chosen(qwen(1), kA100) == "skinny_2");
  CHECK(chosen(qwen(64), kA100) == "skinny_8");
  CHECK(chosen(qwen(1), kT4) == "mma_64x64");
}

TEST_CASE("what grouped kernels can run", "[matmul]") {
  const auto can_run = [](const GroupedProblem &problem, const char *config) {
    return cuda::grouped_can_run(problem, kH200, cuda::config_named(config));
  };
  for (int config = 0; config < cuda::kMatmulConfigCount; ++config)
    CHECK(cuda::grouped_can_run(qwen(8), kH200, config) ==
          (config == cuda::kMma64x64 || cuda::is_skinny(config) ||
           cuda::kHasGroupedWgmma<Weight>(config)));
  GroupedProblem problem = qwen(8);
  problem.weight.blocksize_log2 = 5;
  CHECK(!can_run(problem, "skinny_8"));
  CHECK(!can_run(problem, "wgmma_32x256"));
  CHECK(can_run(problem, "mma_64x64"));
  problem = qwen(8);
  problem.x_stride += 4;  // its rows are not 16-byte aligned
  CHECK(!can_run(problem, "skinny_8"));
  CHECK(!can_run(problem, "wgmma_32x256"));
  problem = qwen(64);
  problem.x_index = at<int32_t>(4096);  // few rows of an expert: no workspace to gather them in
  CHECK(!can_run(problem, "wgmma_32x256"));
  problem = qwen(65);
  problem.x_rows = 0;
  CHECK(!can_run(problem, "wgmma_32x256"));
  problem.x_index = at<int32_t>(4096);
  CHECK(can_run(problem, "wgmma_32x256"));
  // More than 2^32 elements.
  CHECK(can_run(product(256, 4096, 7168, 8), "skinny_2"));
  // Numbers of tiles past 31 bits.
  problem = product(1024, 65536, 256, int64_t{1} << 30);
  CHECK(!can_run(problem, "skinny_2"));
  CHECK(can_run(problem, "mma_64x64"));
}
