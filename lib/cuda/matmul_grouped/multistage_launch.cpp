// Launches of the grouped multistage kernels.
#include <algorithm>

#include "cuda/matmul/multistage/launch.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul_grouped/launch.hpp"
#include "cuda/matmul_grouped/multistage_args.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/shared_memory.hpp"

namespace nf4::cuda {
namespace {

cudaError_t allow_grouped_multistage(const GpuFamily &family, const Device &device) {
  return allow_shared_memory<&GroupedMultistageKernels::of>(family, device);
}

}  // namespace

cudaError_t load_grouped_multistage_kernels(const GpuFamily &family, const Device &device) {
  const cudaError_t error = load_kernels(kernels_of<GroupedMultistageKernels>(family));
  return error == cudaSuccess ? allow_grouped_multistage(family, device) : error;
}

cudaError_t launch_grouped_multistage(const MatmulTarget &target, const GroupedProblem &problem,
                                      int config) {
  if (const cudaError_t error = allow_grouped_multistage(*target.family, target.device))
    return error;
  const MatmulConfig &tile = kMatmulConfigs[config];
  GroupedMultistageArgs args{};
  args.matmul = experts_args(problem, problem.weight);
  args.decode = decode_args(problem.weight, problem.dtype, tile);
  args.schedule.k_tiles = static_cast<int>(problem.weight.cols / kMultistageTileK);
  args.scale_pairs = has_scale_pairs(problem.weight);
  args.y_vectors = has_y_vectors(problem.y, problem.y_stride, problem.m);
  args.groups = groups_of(problem);
  args.expert_n_tiles = static_cast<int>(expert_n_tiles(problem, config));
  const int64_t tiles = max_chunks(problem, tile.tile_m) * args.expert_n_tiles;
  const auto &kernels =
      kernels_of<GroupedMultistageKernels>(*target.family).of[problem.weight.has_scale_bytes()];
  return launch(
      {kernels[problem.dtype - NF4_DTYPE_FP16][config - kFirstMultistage],
       std::min<int64_t>(tiles, target.gpu.multiprocessors), kMultistageThreads, target.family->pdl,
       target.stream,
       multistage_smem_bytes(kind_of(problem.weight), tile.tile_m, target.family->tensor_cores)},
      args);
}

}  // namespace nf4::cuda
