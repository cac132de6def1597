// Host side of grouped products: choose a kernel, launch.
#include "cuda/matmul_grouped/matmul_grouped.hpp"

#include <algorithm>
#include <iterator>

#include "cuda/backend.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/skinny/launch.hpp"
#include "cuda/matmul/skinny/plan_work.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul_grouped/args.hpp"
#include "cuda/matmul_grouped/choose.hpp"
#include "cuda/matmul_grouped/kernels.hpp"
#include "cuda/matmul_grouped/wgmma_args.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

std::optional<int> forced_config;

int choose(const GroupedProblem &problem, const GpuFacts &gpu) {
  if (!forced_config) return choose_grouped(problem, gpu);
  return grouped_can_run(problem, gpu, *forced_config) ? *forced_config : kMma64x64;
}

MatmulArgs matmul_args(const GroupedProblem &problem) {
  MatmulArgs args{};
  args.weight = view_of(problem.weight);
  args.x = problem.x;
  args.bias = problem.bias;
  args.y = problem.y;
  args.m = problem.x_rows;
  args.x_stride = problem.x_stride;
  args.y_stride = problem.y_stride;
  args.x_vectors = has_x_vectors(stack_problem(problem));
  args.whole_words = is_multiple(args.weight.packed, 16) && args.weight.cols % 32 == 0;
  return args;
}

Groups groups_of(const GroupedProblem &problem) {
  return {problem.ends,
          problem.x_index,
          problem.row_scale,
          problem.bias_stride,
          problem.experts,
          static_cast<int32_t>(problem.expert_rows()),
          static_cast<int32_t>(problem.m)};
}

cudaError_t allow_shared_memory(const GpuFamily &family, const Device &device) {
  static ContextFlag known[std::size(kGpuFamilies)];
  ContextFlag &flag = known[&family - kGpuFamilies];
  if (flag.has(device.index)) return cudaSuccess;
  for (const auto &of_dtype : kernels_of<GroupedKernels>(family).skinny)
    for (const auto &of_scales : of_dtype)
      for (const void *kernel : of_scales) {
        if (kernel == nullptr) continue;
        const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
        if (error != cudaSuccess) return error;
      }
  flag.set(device.index);
  return cudaSuccess;
}

cudaError_t launch_skinny(const MatmulTarget &target, const GroupedProblem &problem, int config) {
  cudaError_t error = allow_shared_memory(*target.family, target.device);
  if (error != cudaSuccess) return error;
  const Weight &weight = problem.weight;
  const int max_m = kMatmulConfigs[config].tile_m;
  GroupedSkinnyArgs args{};
  args.matmul = matmul_args(problem);
  args.codebook = rounded_codebook(args.matmul.weight, problem.dtype);
  args.groups = groups_of(problem);
  args.expert_tiles = static_cast<int>(expert_n_tiles(problem, config));
  const int64_t tiles = max_chunks(problem, max_m) * args.expert_tiles;
  const int64_t ctas = std::min<int64_t>(tiles, target.gpu.multiprocessors);
  plan_work(tiles, weight.cols, ctas, args.work);
  const int smem_bytes = plan_skinny_smem(
      skinny_smem_of(problem.dtype, max_m, target.gpu.tensor_maps), kSkinnyWarps,
      std::min<int64_t>(args.expert_tiles, ceil_divide(tiles, ctas)), target.gpu, args);
  // So that all warps have as many rows of tiles of a group.
  if (args.work.group_tiles > args.work.n_warps)
    args.work.group_tiles -= args.work.group_tiles % args.work.n_warps;
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

cudaError_t allow_shared_memory(const GroupedWgmmaKernels &kernels, const Device &device) {
  static ContextFlag known;
  if (known.has(device.index)) return cudaSuccess;
  for (const GroupedWgmmaKernel &config : kernels.of)
    for (const void *kernel : config.kernels) {
      const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes);
      if (error != cudaSuccess) return error;
    }
  const cudaError_t error = load_kernels(&kernels.gather, 1);
  if (error == cudaSuccess) known.set(device.index);
  return error;
}

// The problem with rows of x in the order of y's, once gather_rows has copied them.
GroupedProblem in_row_order(const GroupedProblem &problem) {
  GroupedProblem ordered = problem;
  if (problem.x_index == nullptr) return ordered;
  ordered.x = problem.workspace;
  ordered.x_stride = problem.weight.cols;
  ordered.x_rows = problem.m;
  ordered.x_index = nullptr;
  return ordered;
}

cudaError_t gather_x(const MatmulTarget &target, const void *kernel,
                     const GroupedProblem &problem) {
  if (problem.x_index == nullptr) return cudaSuccess;
  const GatherArgs args{groups_of(problem),
                        static_cast<const uint4 *>(problem.x),
                        problem.x_rows,
                        problem.x_stride / 8,
                        static_cast<uint4 *>(problem.workspace),
                        static_cast<int>(problem.weight.cols / 8)};
  const int64_t ctas = std::min<int64_t>(ceil_divide(problem.m, kGatherThreads / 32),
                                         target.gpu.multiprocessors * 8);
  return target.launch(kernel, ctas, kGatherThreads, args);
}

cudaError_t launch_wgmma(const MatmulTarget &target, const GroupedProblem &given, int config) {
  const auto &kernels = *exact_kernels_for<GroupedWgmmaKernels>(target.device.compute_capability);
  cudaError_t error = allow_shared_memory(kernels, target.device);
  if (error != cudaSuccess) return error;
  error = gather_x(target, kernels.gather, given);
  if (error != cudaSuccess) return error;
  const GroupedProblem problem = in_row_order(given);
  const GroupedWgmmaKernel &kernel = kernels.of[grouped_wgmma_index(config)];
  GroupedWgmmaArgs args{};
  args.matmul = matmul_args(problem);
  args.groups = groups_of(problem);
  args.expert_n_tiles = static_cast<int>(expert_n_tiles(problem, config));
  args.cluster_size = 1;
  args.y_vectors = is_multiple(problem.y, 16) && problem.y_stride % 8 == 0;
  error = set_weight(problem.weight, problem.dtype, kMatmulConfigs[config], args);
  if (error != cudaSuccess) return error;
  error = make_tensor_map({problem.x, problem.x_rows, problem.weight.cols * 2},
                          problem.x_stride * 2, kStepK * 2, kernel.x_box_rows, args.x_map);
  if (error != cudaSuccess) return error;
  const int64_t tiles = max_chunks(problem, kMatmulConfigs[config].tile_m) * args.expert_n_tiles;
  return launch({kernel.kernels[problem.dtype - NF4_DTYPE_FP16],
                 std::min<int64_t>(tiles, target.gpu.multiprocessors), kernel.threads, true,
                 target.stream, kernel.smem_bytes},
                args);
}

cudaError_t launch_mma(const MatmulTarget &target, const GroupedProblem &problem) {
  GroupedArgs args{};
  static_cast<MatmulArgs &>(args) = matmul_args(problem);
  args.groups = groups_of(problem);
  // A weight without elements has no scales, of either kind.
  const bool nested = problem.weight.nested() && problem.weight.elements != 0;
  const int64_t tiles = max_chunks(problem, kMmaTileM) * expert_n_tiles(problem, kMma64x64);
  const int64_t ctas = std::min<int64_t>(tiles, target.gpu.multiprocessors * 2);
  return target.launch(
      kernels_of<GroupedKernels>(*target.family).mma[problem.dtype - NF4_DTYPE_FP16][nested], ctas,
      kMmaThreads, args);
}

// Calls visit(target, configuration), which returns a cudaError_t, with the device current.
template <class Visit>
nf4_status with_choice(const GroupedProblem &problem, nf4_stream stream, const Visit &visit) {
  return launch_on_device(problem.operands, stream, "launching matmul_grouped",
                          [&](const LaunchTarget &where) {
                            const MatmulTarget target{where, facts_of(where)};
                            return visit(target, choose(problem, target.gpu));
                          });
}

}  // namespace

nf4_status matmul_grouped(const GroupedProblem &problem, nf4_stream stream) {
  return with_choice(problem, stream, [&](const MatmulTarget &target, int config) {
    if (is_skinny(config)) return launch_skinny(target, problem, config);
    return is_wgmma(config) ? launch_wgmma(target, problem, config) : launch_mma(target, problem);
  });
}

nf4_status matmul_grouped_grad(const GroupedProblem &, nf4_stream) {
  return fail(NF4_STATUS_UNSUPPORTED_DEVICE,
              "this build has no kernels for the gradient of grouped products");
}

nf4_status matmul_grouped(const Int4GroupedProblem &, nf4_stream) {
  return fail(NF4_STATUS_UNSUPPORTED_DEVICE,
              "this build has no kernels for grouped products of integer weights");
}

nf4_status matmul_grouped_config(const GroupedProblem &problem, nf4_stream stream, int &config) {
  return with_choice(problem, stream, [&](const MatmulTarget &, int chosen) {
    config = chosen;
    return cudaSuccess;
  });
}

void force_matmul_grouped(std::optional<int> config) { forced_config = config; }

bool matmul_grouped_has(const GpuFamily &family, int config, int compute_capability) {
  if (config == kMma64x64) return true;
  if (is_skinny(config)) return family.tensor_cores;
  LaunchTarget target{};
  target.family = &family;
  target.device.compute_capability = compute_capability;
  return grouped_wgmma_index(config) >= 0 && facts_of(target).wgmma;
}

cudaError_t load_matmul_grouped_kernels(const GpuFamily &family, const Device &device) {
  cudaError_t error = load_kernels(kernels_of<GroupedKernels>(family));
  if (error == cudaSuccess) error = allow_shared_memory(family, device);
  LaunchTarget target{};
  target.family = &family;
  target.device = device;
  if (error != cudaSuccess || !facts_of(target).wgmma) return error;
  return allow_shared_memory(*exact_kernels_for<GroupedWgmmaKernels>(device.compute_capability),
                             device);
}

}  // namespace nf4::cuda
