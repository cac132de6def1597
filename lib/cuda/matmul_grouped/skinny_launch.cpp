// Launches of the grouped skinny kernels.
#include <algorithm>

#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/matmul/skinny/plan_work.hpp"
#include "cuda/matmul_grouped/kernels.hpp"
#include "cuda/matmul_grouped/launch.hpp"
#include "cuda/runtime/shared_memory.hpp"

namespace nf4::cuda {
namespace {

// Fills in the shares of CTAs; returns the number of CTAs.
template <class Args, class W>
int64_t plan_tiles(const MatmulTarget &target, const GroupedProblemOf<W> &problem, int config,
                   const SkinnyLayout &layout, Args &args) {
  args.groups = groups_of(problem);
  args.expert_tiles = static_cast<int>(expert_n_tiles(problem, config));
  const int64_t tiles = max_chunks(problem, kMatmulConfigs[config].tile_m) * args.expert_tiles;
  const int64_t ctas = std::min<int64_t>(tiles, target.gpu.multiprocessors);
  plan_work(tiles, problem.weight.cols, ctas, layout, args.work);
  return ctas;
}
// Plans groups of rows of warp tiles by plan(most), which finds the shared memory for up to so
// many: one group of all that a CTA may have of an expert, if they fit; it need not wait for the
// scales of a second.
template <class Args, class Plan>
int plan_groups(Args &args, const Plan &plan) {
  SkinnyWork &work = args.work;
  const int tiles = args.expert_tiles;
  // More than its share where it keeps to one expert (TileGroups).
  const int most = std::min(tiles, work.cta_units + 1 + work.cta_units / 16);
  int smem_bytes = plan(most);
  if (work.group_tiles >= most) return smem_bytes;
  const int share = std::min(tiles, work.cta_units + (work.big_ctas > 0));
  smem_bytes = plan(share);
  // Makes several groups such that all warps have the same number of rows of tiles.
  if (work.group_tiles < share && work.group_tiles > work.n_warps)
    work.group_tiles -= work.group_tiles % work.n_warps;
  return smem_bytes;
}

}  // namespace

cudaError_t allow_grouped_skinny(const GpuFamily &family, const Device &device) {
  const cudaError_t error = allow_shared_memory<&GroupedKernels::skinny>(family, device);
  return error != cudaSuccess ? error
                              : allow_shared_memory<&GroupedKernels::int4_skinny>(family, device);
}

cudaError_t launch_grouped_skinny(const MatmulTarget &target, const GroupedProblem &problem,
                                  int config) {
  cudaError_t error = allow_grouped_skinny(*target.family, target.device);
  if (error != cudaSuccess) return error;
  const Weight &weight = problem.weight;
  const int max_m = kMatmulConfigs[config].tile_m;
  GroupedSkinnyArgs args{};
  args.matmul = experts_args(problem, weight);
  args.codebook = rounded_codebook(args.matmul.weight, problem.dtype);
  const int layout_index = skinny_layout_index(problem.dtype, max_m, target.gpu, /*experts=*/true);
  const SkinnyLayout &layout = kSkinnyLayouts[layout_index];
  const int64_t ctas = plan_tiles(target, problem, config, layout, args);
  const int smem_bytes = plan_groups(
      args, [&](int most) { return plan_skinny_smem(layout, max_m, most, target.gpu, args); });
  if (target.gpu.tensor_maps) {
    error = make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2,
                            kWarpTileK / 2, kWarpTileN, args.packed);
    if (error != cudaSuccess) return error;
  }
  const void *const kernel = kernels_of<GroupedKernels>(*target.family)
                                 .skinny[layout_index][problem.dtype - NF4_DTYPE_FP16]
                                        [scale_kind(weight)][config - kFirstSkinny];
  return launch({kernel, ctas, 32 * layout.warps, target.family->pdl, target.stream, smem_bytes},
                args);
}

cudaError_t launch_grouped_skinny(const MatmulTarget &target, const Int4GroupedProblem &problem,
                                  int config) {
  cudaError_t error = allow_grouped_skinny(*target.family, target.device);
  if (error != cudaSuccess) return error;
  GroupedInt4SkinnyArgs args{};
  args.matmul = experts_args(problem, expert_weight(problem));
  const int64_t ctas = plan_tiles(target, problem, config, kInt4Layout, args);
  const SkinnySmem smem = int4_skinny_smem(kMatmulConfigs[config].tile_m);
  const int smem_bytes = plan_groups(
      args, [&](int most) { return plan_int4_skinny_smem(smem, most, target.gpu, args); });
  error = make_int4_skinny_map(view_of(stack_weight(problem)), args.packed);
  if (error != cudaSuccess) return error;
  const void *const kernel =
      kernels_of<GroupedKernels>(*target.family)
          .int4_skinny[problem.dtype - NF4_DTYPE_FP16][problem.weight.layout - NF4_INT4_GPTQ]
                      [config - kFirstSkinny];
  return launch({kernel, ctas, kSkinnyThreads, target.family->pdl, target.stream, smem_bytes},
                args);
}

}  // namespace nf4::cuda
