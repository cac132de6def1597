// Host side of grouped products, their gradient, and those of integer weights: choose a kernel,
// launch.
#include "cuda/matmul_grouped/matmul_grouped.hpp"

#include <algorithm>
#include <type_traits>

#include "cuda/backend.hpp"
#include "cuda/matmul/matmul.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul_grouped/choose.hpp"
#include "cuda/matmul_grouped/kernels.hpp"
#include "cuda/matmul_grouped/launch.hpp"
#include "cuda/matmul_grouped/wgmma_args.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

std::optional<int> forced_config;

template <class W>
int choose(const GroupedProblemOf<W> &problem, const GpuFacts &gpu) {
  if (!forced_config) return choose_grouped(problem, gpu);
  return grouped_can_run(problem, gpu, *forced_config) ? *forced_config : kMma64x64;
}

// ---- mma ----------------------------------------------------------------------------------

template <class W>
cudaError_t launch_mma(const MatmulTarget &target, const GroupedProblemOf<W> &problem) {
  using Args = typename ArgsOf<W>::Matmul;
  GroupedArgsOf<Args> args{};
  static_cast<Args &>(args) = experts_args(problem, expert_weight(problem));
  args.groups = groups_of(problem);
  const int64_t tiles = max_chunks(problem, kMmaTileM) * expert_n_tiles(problem, kMma64x64);
  const int64_t ctas = std::min<int64_t>(tiles, target.gpu.multiprocessors * 2);
  const void *const kernel =
      experts_mma_kernel(kernels_of<GroupedKernels>(*target.family), problem);
  return target.launch(kernel, ctas, kMmaThreads, args);
}

// ---- wgmma --------------------------------------------------------------------------------

const GatherKernels &gather_kernels(const Device &device) {
  return *exact_kernels_for<GatherKernels>(device.compute_capability);
}

cudaError_t load_wgmma(const Device &device, WgmmaTable table) {
  static ContextFlag gather;
  if (!gather.has(device.index)) {
    if (const cudaError_t error = load_kernels(gather_kernels(device))) return error;
    gather.set(device.index);
  }
  return load_wgmma_kernels(device, table, /*experts=*/true);
}

// The problem with rows of x in the order of y's, once gather_rows has copied them.
template <class W>
GroupedProblemOf<W> in_row_order(const GroupedProblemOf<W> &problem) {
  GroupedProblemOf<W> ordered = problem;
  if (problem.x_index == nullptr) return ordered;
  ordered.x = problem.workspace;
  ordered.x_stride = problem.x_columns();
  ordered.x_rows = problem.m;
  ordered.x_index = nullptr;
  return ordered;
}

template <class W>
cudaError_t gather_x(const MatmulTarget &target, const GroupedProblemOf<W> &problem) {
  if (problem.x_index == nullptr) return cudaSuccess;
  const GatherArgs args{groups_of(problem),
                        static_cast<const uint4 *>(problem.x),
                        problem.x_rows,
                        problem.x_stride / 8,
                        static_cast<uint4 *>(problem.workspace),
                        static_cast<int>(problem.x_columns() / 8)};
  const int64_t ctas = std::min<int64_t>(ceil_divide(problem.m, kGatherThreads / 32),
                                         target.gpu.multiprocessors * 8);
  return target.launch(gather_kernels(target.device).gather, ctas, kGatherThreads, args);
}

template <class W>
cudaError_t launch_wgmma(const MatmulTarget &target, const GroupedProblemOf<W> &given, int config) {
  cudaError_t error = load_wgmma(target.device, table_of(given.weight));
  if (error != cudaSuccess) return error;
  error = gather_x(target, given);
  if (error != cudaSuccess) return error;
  const GroupedProblemOf<W> problem = in_row_order(given);
  const WgmmaKernel &kernel = (*find_wgmma_kernels(
      target.device.compute_capability, table_of(problem.weight), /*experts=*/true))[config];
  const W weight = wgmma_weight(problem);
  GroupedWgmmaArgsOf<typename ArgsOf<W>::Wgmma> args{};
  args.matmul = experts_args(problem, weight);
  args.groups = groups_of(problem);
  args.expert_n_tiles = static_cast<int>(expert_n_tiles(problem, config));
  args.cluster_size = 1;
  args.y_vectors = is_multiple(problem.y, 16) && problem.y_stride % 8 == 0;
  error = set_weight<W, typename ArgsOf<W>::Wgmma>(weight, stack_weight(problem), problem.dtype,
                                                   kMatmulConfigs[config], args);
  if (error != cudaSuccess) return error;
  error = make_tensor_map({problem.x, problem.x_rows, problem.x_columns() * 2},
                          problem.x_stride * 2, kStepK * 2, kernel.x_box_rows, args.x_map);
  if (error != cudaSuccess) return error;
  const int64_t tiles = max_chunks(problem, kMatmulConfigs[config].tile_m) * args.expert_n_tiles;
  return launch({kernel.kernels[problem.dtype - NF4_DTYPE_FP16],
                 std::min<int64_t>(tiles, target.gpu.multiprocessors), kernel.threads, true,
                 target.stream, kernel.smem_bytes},
                args);
}

// ---- Any ----------------------------------------------------------------------------------

template <class W>
cudaError_t launch_config(const MatmulTarget &target, const GroupedProblemOf<W> &problem,
                          int config) {
  if constexpr (kHasGroupedSkinny<W>)
    if (is_skinny(config)) return launch_grouped_skinny(target, problem, config);
  if constexpr (kHasGroupedMultistage<W>)
    if (is_multistage(config)) return launch_grouped_multistage(target, problem, config);
  return is_wgmma(config) ? launch_wgmma(target, problem, config) : launch_mma(target, problem);
}

// Calls visit(target, configuration), which returns a cudaError_t, with the device current.
template <class W, class Visit>
nf4_status with_choice(const GroupedProblemOf<W> &problem, nf4_stream stream, const Visit &visit) {
  return launch_on_device(problem.operands, stream, launching_experts(problem.weight),
                          [&](const LaunchTarget &where) {
                            const MatmulTarget target{where, facts_of(where)};
                            return visit(target, choose(problem, target.gpu));
                          });
}

template <class W>
nf4_status launch_problem(const GroupedProblemOf<W> &problem, nf4_stream stream) {
  return with_choice(problem, stream, [&](const MatmulTarget &target, int config) {
    return launch_config(target, problem, config);
  });
}

template <class W>
nf4_status config_of(const GroupedProblemOf<W> &problem, nf4_stream stream, int &config) {
  return with_choice(problem, stream, [&](const MatmulTarget &, int chosen) {
    config = chosen;
    return cudaSuccess;
  });
}

}  // namespace

nf4_status matmul_grouped(const GroupedProblem &problem, nf4_stream stream) {
  return launch_problem(problem, stream);
}
nf4_status matmul_grouped_grad(const GroupedProblem &problem, nf4_stream stream) {
  return launch_problem(transposed(problem), stream);
}
nf4_status matmul_grouped(const Int4GroupedProblem &problem, nf4_stream stream) {
  return launch_problem(problem, stream);
}

nf4_status matmul_grouped_config(const GroupedProblem &problem, nf4_stream stream, int &config) {
  return problem.gradient ? config_of(transposed(problem), stream, config)
                          : config_of(problem, stream, config);
}
nf4_status matmul_grouped_config(const Int4GroupedProblem &problem, nf4_stream stream,
                                 int &config) {
  return config_of(problem, stream, config);
}

void force_matmul_grouped(std::optional<int> config) { forced_config = config; }

template <class W>
bool matmul_grouped_has(const GpuFamily &family, int config, int compute_capability) {
  if (!has_experts_kernel(kind_of(W{}), config)) return false;
  if (is_mma(config)) return true;
  if (is_skinny(config))
    return std::is_same_v<W, Weight> ? family.fp16_tensor_cores : family.tensor_maps;
  if (is_multistage(config)) return matmul_has(family, config, compute_capability);
  LaunchTarget target{};
  target.family = &family;
  target.device.compute_capability = compute_capability;
  return facts_of(target).wgmma;
}
template bool matmul_grouped_has<Weight>(const GpuFamily &, int, int);
template bool matmul_grouped_has<TransposedWeight>(const GpuFamily &, int, int);
template bool matmul_grouped_has<Int4Weight>(const GpuFamily &, int, int);

cudaError_t load_matmul_grouped_kernels(const GpuFamily &family, const Device &device) {
  cudaError_t error = load_kernels(kernels_of<GroupedKernels>(family));
  if (error == cudaSuccess) error = allow_grouped_skinny(family, device);
  if (error == cudaSuccess) error = load_grouped_multistage_kernels(family, device);
  LaunchTarget target{};
  target.family = &family;
  target.device = device;
  if (error != cudaSuccess || !facts_of(target).wgmma) return error;
  for (int table = 0; table < kWgmmaTableCount; ++table)
    if (error == cudaSuccess) error = load_wgmma(device, static_cast<WgmmaTable>(table));
  return error;
}

}  // namespace nf4::cuda
