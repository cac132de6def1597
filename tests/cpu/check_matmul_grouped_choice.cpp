// The kernel that a grouped product takes, without a GPU.
#include <cstdint>
#include <string>

#include "cuda/matmul_grouped/choose.hpp"
#include "support/catch.hpp"

using namespace nf4;

namespace {

constexpr cuda::GpuFacts kH200{132, 232448, true, true, true, true, {}};
constexpr cuda::GpuFacts kA100{108, 166912, true, true, false, false, {}};
constexpr cuda::GpuFacts kT4{40, 65536, true, false, false, false, {}};

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

// A stack of experts' integers, groups of 128.
Int4GroupedProblem integers(nf4_int4_layout layout, int64_t rows, int64_t cols, int64_t m) {
  Int4GroupedProblem problem{};
  Int4Weight &weight = problem.weight;
  weight.layout = layout;
  weight.scales_dtype = NF4_DTYPE_BF16;
  weight.rows = rows;
  weight.cols = cols;
  weight.elements = rows * cols;
  weight.group_size = 128;
  weight.groups = cols / 128;
  weight.packed = at<uint32_t>(4096);
  weight.scales = at(4096);
  weight.zeros = at<uint32_t>(4096);
  problem.dtype = NF4_DTYPE_BF16;
  problem.experts = 128;
  problem.m = m;
  problem.x = at(4096);
  problem.x_stride = cols;
  problem.x_rows = m;
  problem.y = at(4096);
  problem.y_stride = rows;
  return problem;
}

template <class W>
std::string chosen(const GroupedProblemOf<W> &problem, const cuda::GpuFacts &gpu) {
  return cuda::kMatmulConfigs[cuda::choose_grouped(problem, gpu)].name;
}

// gate_up of Qwen3-30B-A3B, by tokens, and its gradient.
GroupedProblem qwen(int64_t tokens) { return product(128, 1536, 2048, tokens * 8); }
cuda::GroupedGradProblem qwen_gradient(int64_t tokens) {
  GroupedProblem problem = qwen(tokens);
  problem.x_stride = 1536;
  problem.y_stride = 2048;
  return cuda::transposed(problem);
}

}  // namespace

TEST_CASE("grouped products take the kernel of the least estimate", "[matmul]") {
  CHECK(chosen(qwen(1), kH200) == "skinny_2");
  CHECK(chosen(qwen(8), kH200) == "skinny_2");
  CHECK(chosen(qwen(64), kH200) == "skinny_8");
  CHECK(chosen(qwen(256), kH200) == "wgmma_32x256");
  CHECK(chosen(qwen(512), kH200) == "wgmma_64x256");
  CHECK(chosen(qwen(1024), kH200) == "wgmma_96x256");
  CHECK(chosen(qwen(2048), kH200) == "wgmma_152x128");
  CHECK(chosen(qwen(4096), kH200) == "wgmma_304x128");
  CHECK(chosen(product(8, 28672, 4096, 2), kH200) == "skinny_2");
  CHECK(chosen(product(8, 28672, 4096, 32), kH200) == "skinny_8");
  CHECK(chosen(product(8, 28672, 4096, 512), kH200) == "wgmma_96x256");
  CHECK(chosen(product(8, 4096, 14336, 512), kH200) == "wgmma_96x256");
  CHECK(chosen(product(8, 28672, 4096, 2048), kH200) == "wgmma_304x128");
  CHECK(chosen(product(8, 28672, 4096, 8192), kH200) == "wgmma_304x128");
  CHECK(chosen(qwen(1), kA100) == "skinny_2");
  CHECK(chosen(qwen(64), kA100) == "skinny_8");
  CHECK(chosen(qwen(1), kT4) == "mma_64x64");
}

TEST_CASE("gradients and integers of experts take the kernel of the least estimate", "[matmul]") {
  CHECK(chosen(qwen_gradient(1), kH200) == "wgmma_64x128");
  CHECK(chosen(qwen_gradient(512), kH200) == "wgmma_64x128");
  CHECK(chosen(qwen_gradient(1024), kH200) == "wgmma_128x128");
  CHECK(chosen(qwen_gradient(4096), kH200) == "wgmma_256x128");
  CHECK(chosen(qwen_gradient(4096), kA100) == "mma_64x64");
  for (const nf4_int4_layout layout : {NF4_INT4_GPTQ, NF4_INT4_AWQ, NF4_INT4_COMPRESSED_TENSORS}) {
    const bool awq = layout == NF4_INT4_AWQ;
    CHECK(chosen(integers(layout, 1536, 2048, 8), kH200) == (awq ? "wgmma_64x128" : "skinny_2"));
    CHECK(chosen(integers(layout, 1536, 2048, 64 * 8), kH200) ==
          (awq ? "wgmma_32x256" : "skinny_8"));
    CHECK(chosen(integers(layout, 1536, 2048, 512 * 8), kH200) == "wgmma_64x128");
    CHECK(chosen(integers(layout, 1536, 2048, 4096 * 8), kH200) == "wgmma_128x128");
    CHECK(chosen(integers(layout, 1536, 2048, 4096 * 8), kA100) == "mma_64x64");
  }
}

TEST_CASE("what kernels of gradients and integers of experts can run", "[matmul]") {
  const int wgmma = cuda::config_named("wgmma_64x128");
  auto gradient = qwen_gradient(8);
  CHECK(cuda::grouped_can_run(gradient, kH200, wgmma));
  CHECK(!cuda::grouped_can_run(gradient, kH200, cuda::kSkinny8));
  gradient.x_index = at<int32_t>(4096);
  CHECK(cuda::grouped_can_run(gradient, kH200, wgmma));
  CHECK(cuda::gathered_bytes(gradient) == 64 * 1536 * 2);
  gradient.weight.cols = 1532;  // rows of dY are no multiples of 16 bytes
  CHECK(!cuda::grouped_can_run(gradient, kH200, wgmma));
  // Words of zero points have rows of two experts.
  CHECK(cuda::grouped_can_run(integers(NF4_INT4_COMPRESSED_TENSORS, 1536, 2048, 8), kH200, wgmma));
  auto odd = integers(NF4_INT4_COMPRESSED_TENSORS, 1532, 2048, 8);
  CHECK(!cuda::grouped_can_run(odd, kH200, wgmma));
  odd.weight.zeros = nullptr;
  CHECK(cuda::grouped_can_run(odd, kH200, wgmma));
  // Those of experts begin with a word; with no row of x there is none to load in its place.
  auto few = integers(NF4_INT4_GPTQ, 1536, 2048, 8);
  CHECK(cuda::grouped_can_run(few, kH200, cuda::kSkinny2));
  few.x_rows = 0;
  CHECK(!cuda::grouped_can_run(few, kH200, cuda::kSkinny2));
  few = integers(NF4_INT4_COMPRESSED_TENSORS, 1532, 2048, 8);
  CHECK(!cuda::grouped_can_run(few, kH200, cuda::kSkinny2));
  CHECK(!cuda::grouped_can_run(integers(NF4_INT4_AWQ, 1536, 2048, 8), kH200, cuda::kSkinny8));
  // More rows than the coordinates of a tensor map.
  auto many = integers(NF4_INT4_GPTQ, 64, 1 << 22, 8);
  many.experts = 512;
  CHECK(!cuda::grouped_can_run(many, kH200, wgmma));
}

TEST_CASE("what grouped kernels can run", "[matmul]") {
  const auto can_run = [](const GroupedProblem &problem, const char *config) {
    return cuda::grouped_can_run(problem, kH200, cuda::config_named(config));
  };
  for (int config = 0; config < cuda::kMatmulConfigCount; ++config)
    CHECK(cuda::grouped_can_run(qwen(8), kH200, config) ==
          cuda::has_experts_kernel(cuda::WeightKind::kCodebook, config));
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
