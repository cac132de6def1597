// Launches of the grouped skinny kernels.
#include <algorithm>
#include <iterator>

#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/matmul/skinny/plan_work.hpp"
#include "cuda/matmul_grouped/kernels.hpp"
#include "cuda/matmul_grouped/launch.hpp"

namespace nf4::cuda {
namespace {

// Fills in the shares of CTAs; returns the number of CTAs.
template <class Args, class W>
int64_t plan_tiles(const MatmulTarget &target, const GroupedProblemOf<W> &problem, int config,
                   Args &args) {
  args.groups = groups_of(problem);
  args.expert_tiles = static_cast<int>(expert_n_tiles(problem, config));
  const int64_t tiles = max_chunks(problem, kMatmulConfigs[config].tile_m) * args.expert_tiles;
  const int64_t ctas = std::min<int64_t>(tiles, target.gpu.multiprocessors);
  plan_work(tiles, problem.weight.cols, ctas, args.work);
  return ctas;
}
// Rows of warp tiles that a CTA may have of an expert.
template <class Args>
int64_t most_tiles(const Args &args) {
  return std::min(args.expert_tiles, args.work.cta_units + (args.work.big_ctas > 0));
}
// So that all warps have as many rows of tiles of a group, where a CTA has several groups. One that
// has all of its tiles need not wait for another's scales.
template <class Args>
void even_warps(Args &args) {
  SkinnyWork &work = args.work;
  if (work.group_tiles > work.n_warps && work.group_tiles < most_tiles(args))
    work.group_tiles -= work.group_tiles % work.n_warps;
}

}  // namespace

cudaError_t allow_grouped_skinny(const GpuFamily &family, const Device &device) {
  static ContextFlag known[std::size(kGpuFamilies)];
  ContextFlag &flag = known[&family - kGpuFamilies];
  if (flag.has(device.index)) return cudaSuccess;
  const auto allow = [&](const auto &of_dtypes) {
    for (const auto &of_dtype : of_dtypes)
      for (const auto &of_weight : of_dtype)
        for (const void *kernel : of_weight) {
          if (kernel == nullptr) continue;
          const cudaError_t error = cudaFuncSetAttribute(
              kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
          if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
  };
  cudaError_t error = allow(kernels_of<GroupedKernels>(family).skinny);
  if (error == cudaSuccess) error = allow(kernels_of<GroupedKernels>(family).int4_skinny);
  if (error == cudaSuccess) flag.set(device.index);
  return error;
}

cudaError_t launch_grouped_skinny(const MatmulTarget &target, const GroupedProblem &problem,
                                  int config) {
  cudaError_t error = allow_grouped_skinny(*target.family, target.device);
  if (error != cudaSuccess) return error;
  const Weight &weight = problem.weight;
  const int max_m = kMatmulConfigs[config].tile_m;
  GroupedSkinnyArgs args{};
  args.matmul = matmul_args(problem, weight);
  args.codebook = rounded_codebook(args.matmul.weight, problem.dtype);
  const int64_t ctas = plan_tiles(target, problem, config, args);
  const int smem_bytes =
      plan_skinny_smem(skinny_smem_of(problem.dtype, max_m, target.gpu.tensor_maps), kSkinnyWarps,
                       most_tiles(args), target.gpu, args);
  even_warps(args);
  if (target.gpu.tensor_maps) {
    error = make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2,
                            kWarpTileK / 2, kWarpTileN, args.packed);
    if (error != cudaSuccess) return error;
  }
  const void *const kernel =
      kernels_of<GroupedKernels>(*target.family)
          .skinny[problem.dtype - NF4_DTYPE_FP16][weight.nested()][config - kSkinny2];
  return launch({kernel, ctas, kSkinnyThreads, target.family->pdl, target.stream, smem_bytes},
                args);
}

cudaError_t launch_grouped_skinny(const MatmulTarget &target, const Int4GroupedProblem &problem,
                                  int config) {
  cudaError_t error = allow_grouped_skinny(*target.family, target.device);
  if (error != cudaSuccess) return error;
  GroupedInt4SkinnyArgs args{};
  args.matmul = matmul_args(problem, expert_weight(problem));
  const int64_t ctas = plan_tiles(target, problem, config, args);
  const int smem_bytes = plan_int4_skinny_smem(int4_skinny_smem(kMatmulConfigs[config].tile_m),
                                               most_tiles(args), target.gpu, args);
  even_warps(args);
  error = make_int4_skinny_map(view_of(stack_weight(problem)), args.packed);
  if (error != cudaSuccess) return error;
  const void *const kernel =
      kernels_of<GroupedKernels>(*target.family)
          .int4_skinny[problem.dtype - NF4_DTYPE_FP16][problem.weight.layout - NF4_INT4_GPTQ]
                      [config - kSkinny2];
  return launch({kernel, ctas, kSkinnyThreads, target.family->pdl, target.stream, smem_bytes},
                args);
}

}  // namespace nf4::cuda
