// The host side of the gradients of an adapter's matrices.

#include "cuda/backend.hpp"
#include "cuda/lora/grad_args.hpp"
#include "cuda/lora/grad_kernels.hpp"
#include "cuda/runtime/shared_memory.hpp"
#include "cuda/runtime/target.hpp"

namespace nf4::cuda {
namespace {

LoraGradHalf half_of(const LoraGradProblem &problem, const LoraGrad &given, int64_t out_width) {
  const int quad_bytes = 4 * element_bytes(problem.grad_dtype);
  LoraGradHalf half{};
  half.left = given.left;
  half.right = given.right;
  half.out = given.out;
  half.right_stride = given.right_stride;
  half.columns = given.columns;
  half.out_stride = given.out_stride;
  half.left_vectors = is_multiple(given.left, 16) && problem.rank % 8 == 0;
  half.out_vectors =
      is_multiple(given.out, quad_bytes) && given.out_stride % 4 == 0 && out_width % 4 == 0;
  return half;
}

int64_t tiles_of(const LoraGrad &half) { return ceil_divide(half.columns, kLoraGradColumns); }

bool has_right_vectors(const LoraGrad &half) {
  return half.columns == 0 ||
         (is_multiple(half.right, 16) && half.right_stride % 8 == 0 && half.columns % 8 == 0);
}

cudaError_t launch_mma(const LaunchTarget &target, const LoraGradProblem &problem,
                       LoraGradArgs &args, int64_t tiles) {
  const auto &kernels = kernels_of<LoraGradKernels>(*target.family).of;
  if (const cudaError_t error =
          allow_shared_memory<&LoraGradKernels::of>(*target.family, target.device))
    return error;
  const bool many_ranks = problem.rank > kLoraGradRanks[0] &&
                          lora_grad_smem(kLoraGradRanks[1]).bytes <= target.device.shared_bytes;
  const int ranks = kLoraGradRanks[many_ranks];
  const bool vectors = has_right_vectors(problem.a) && has_right_vectors(problem.b);
  args.rank_chunks = static_cast<int>(ceil_divide(problem.rank, ranks));
  return launch(
      {kernels[problem.dtype - NF4_DTYPE_FP16][vectors][many_ranks], tiles * args.rank_chunks,
       kLoraGradThreads, target.family->pdl, target.stream, lora_grad_smem(ranks).bytes},
      args);
}

}  // namespace

nf4_status lora_grad(const LoraGradProblem &problem, nf4_stream stream) {
  LoraGradArgs args{};
  args.a = half_of(problem, problem.a, problem.a.columns);
  args.b = half_of(problem, problem.b, problem.rank);
  args.m = problem.m;
  args.tiles_of_a = tiles_of(problem.a);
  args.scale = problem.scale;
  args.rank = problem.rank;
  args.out_is_fp32 = problem.grad_dtype == NF4_DTYPE_FP32;
  const int64_t tiles = args.tiles_of_a + tiles_of(problem.b);
  const auto run = [&](const LaunchTarget &target) {
    if (problem.dtype != NF4_DTYPE_FP32 && target.family->tensor_cores)
      return launch_mma(target, problem, args, tiles);
    args.rank_chunks = static_cast<int>(ceil_divide(problem.rank, kLoraGradAnyRanks));
    const LoraGradKernels &kernels = kernels_of<LoraGradKernels>(*target.family);
    return target.launch(kernels.any[problem.dtype - NF4_DTYPE_FP32], tiles * args.rank_chunks,
                         kLoraGradThreads, args);
  };
  return launch_on_device(problem.operands, stream, "launching lora_grad", run);
}

}  // namespace nf4::cuda
