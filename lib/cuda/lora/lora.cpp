// The host side of x A^T.
#include "cuda/lora/lora.hpp"

#include <algorithm>

#include "cuda/lora/kernels.hpp"
#include "cuda/lora/tma.hpp"
#include "cuda/lora/vectors.hpp"
#include "cuda/lora/workspace.hpp"
#include "cuda/runtime/signature.hpp"

namespace nf4::cuda {
namespace {

constexpr int kFewRanks = 16, kManyRanks = 64;

void *copy_in(const LoraProblem &problem, void *workspace) {
  return static_cast<uint8_t *>(workspace) +
         problem.m * lora_stride(problem.lora) * element_bytes(problem.dtype);
}

// The transposed kernels need the rows of `out` in an order of their own (copy_out).
bool can_use_tma(const LoraProblem &problem) {
  const Lora &lora = problem.lora;
  return !problem.gradient && lora.dtype == problem.dtype && lora.rank % 8 == 0 &&
         has_vectors(lora.b, lora.b_stride, lora.dtype);
}

// Tells whether rows of x and of A load as vectors of eight.
bool has_a_vectors(const LoraProblem &problem) {
  const Lora &lora = problem.lora;
  return has_x_vectors(problem) && problem.cols % 8 == 0 &&
         has_vectors(lora.a, lora.a_stride, lora.dtype);
}

void set_operands(const LoraProblem &problem, void *workspace, LoraProductOperands &args) {
  const Lora &lora = problem.lora;
  args.x = problem.x;
  args.x_stride = problem.x_stride;
  args.m = problem.m;
  args.cols = problem.cols;
  args.in = problem.in;
  args.scale = lora.scale;
  args.rank = lora.rank;
  args.stride = static_cast<int>(lora_stride(lora));
  args.product = lora.product;
  args.scaled = workspace;
}

LoraProductArgs product_args(const LoraProblem &problem, void *workspace, bool tma) {
  LoraProductArgs args{};
  set_operands(problem, workspace, args);
  args.out = problem.out;
  args.out_rows = problem.rows;
  args.permuted = problem.gradient;
  if (tma && !can_use_tma(problem)) {
    args.out_copy = copy_in(problem, workspace);
    // About one vector per thread, up to 128 CTAs: the vectors of a thread wait for one another.
    const int64_t vectors = lora_copy_rows(args.out_rows) * args.stride / 8;
    args.copy_ctas = static_cast<int>(std::clamp<int64_t>(vectors / kLoraProductThreads, 1, 128));
  }
  return args;
}

cudaError_t launch_ctas(const LaunchTarget &target, const void *kernel, LoraProductArgs &args,
                        int64_t product_ctas) {
  // The CTAs that copy are whole clusters, too.
  const int cluster = 1 << args.cluster_log2;
  args.copy_ctas = static_cast<int>(ceil_divide(args.copy_ctas, cluster) * cluster);
  args.product_ctas = static_cast<int>(product_ctas);
  return launch({kernel, product_ctas + args.copy_ctas, kLoraProductThreads, target.family->pdl,
                 target.stream, 0, cluster},
                args);
}

}  // namespace

LoraProblem::LoraProblem(const MatmulProblem &problem)
    : dtype(problem.dtype),
      m(problem.m),
      x(problem.x),
      x_stride(problem.x_stride),
      cols(problem.weight.cols),
      rows(problem.weight.rows),
      lora(problem.lora),
      in{lora.a, lora.a_stride, 1, lora.dtype == NF4_DTYPE_FP32},
      out{lora.b, 1, lora.b_stride, lora.dtype == NF4_DTYPE_FP32},
      gradient(false) {}

LoraProblem::LoraProblem(const GradProblem &problem)
    : dtype(problem.dtype),
      m(problem.m),
      x(problem.x),
      x_stride(problem.x_stride),
      cols(problem.weight.cols),
      rows(problem.weight.rows),
      lora(problem.lora),
      in{lora.b, 1, lora.b_stride, lora.dtype == NF4_DTYPE_FP32},
      out{lora.a, lora.a_stride, 1, lora.dtype == NF4_DTYPE_FP32},
      gradient(true) {}

LoraTerm lora_term_of(const LoraProblem &problem, void *workspace) {
  const Lora &lora = problem.lora;
  if (lora.rank == 0) return {};
  return {
      workspace, problem.out, static_cast<int>(lora_stride(lora)), lora.rank,
      !problem.gradient && lora.rank % 8 == 0 && has_vectors(lora.b, lora.b_stride, lora.dtype)};
}

LoraCtaArgs lora_cta_args(const LoraProblem &problem, void *workspace) {
  const Lora &lora = problem.lora;
  if (lora.rank == 0) return {};
  auto *const flags = static_cast<uint64_t *>(workspace);
  LoraCtaArgs args{};
  set_operands(problem, workspace, args);
  args.ctas = has_lora_ctas(problem) ? lora_ctas(lora, problem.cols) : 0;
  args.parts = reinterpret_cast<float *>(flags + lora_flags(lora, problem.rows));
  args.flags = flags;
  args.signature = next_signature();
  return args;
}

bool has_lora_ctas(const LoraProblem &problem) {
  return problem.dtype != NF4_DTYPE_FP32 && has_a_vectors(problem);
}

LoraMatrix lora_out_for_tma(const LoraProblem &problem, void *workspace) {
  const Lora &lora = problem.lora;
  if (can_use_tma(problem)) return {lora.b, problem.rows, lora.b_stride, lora.rank};
  const auto stride = static_cast<int>(lora_stride(lora));
  return {copy_in(problem, workspace), lora_copy_rows(problem.rows), stride, stride};
}

cudaError_t launch_lora_product(const LaunchTarget &target, const LoraProblem &problem,
                                void *workspace, bool wgmma) {
  LoraProductArgs args = product_args(problem, workspace, wgmma);
  if (const int ctas = wgmma ? plan_lora(target.device, problem).persistent_ctas : 0)
    return launch_persistent_lora(target, problem, args, ctas);
  if (can_run_wide_lora(target, problem)) return launch_wide_lora(target, problem, args);
  const LoraKernels &kernels = kernels_of<LoraKernels>(*target.family);
  const bool vectors =
      problem.gradient ? has_x_vectors(problem) && args.cols % 8 == 0 : has_a_vectors(problem);
  if (problem.dtype == NF4_DTYPE_FP32 || !target.family->tensor_cores || !vectors)
    return launch_ctas(target, kernels.any[problem.dtype - NF4_DTYPE_FP32], args,
                       ceil_divide(args.m * args.stride, kLoraProductThreads / 32));
  const bool many_ranks = args.rank > kFewRanks, many_rows = args.m > 16;
  args.rank_chunks =
      static_cast<int>(ceil_divide(args.stride, many_ranks ? kManyRanks : kFewRanks));
  const int64_t tiles = ceil_divide(args.m, many_rows ? 32 : 16) * args.rank_chunks;
  // The number of CTAs that are resident at a time, as long as each of their warps has columns: two
  // per multiprocessor, and fewer with larger clusters.
  const int64_t steps = ceil_divide(args.cols, 32 * kLoraProductThreads / 32);
  if (target.family->tensor_maps)
    while (args.cluster_log2 < kMaxLoraClusterLog2 && 2 << args.cluster_log2 <= steps &&
           tiles << (args.cluster_log2 + 1) <=
               target.device.multiprocessors * (args.cluster_log2 == 0 ? 4 : 3) / 2)
      ++args.cluster_log2;
  const void *const kernel = kernels.product[problem.dtype - NF4_DTYPE_FP16][args.in.is_fp32]
                                            [problem.gradient][many_rows][many_ranks];
  return launch_ctas(target, kernel, args, tiles << args.cluster_log2);
}

}  // namespace nf4::cuda
