#include "cuda/matmul/wgmma/launch.hpp"

#include <algorithm>
#include <atomic>

#include "cuda/lora/lora.hpp"
#include "cuda/lora/workspace.hpp"
#include "cuda/matmul/launch.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/signature.hpp"

namespace nf4::cuda {

namespace {

template <bool Experts>
const WgmmaKernels *find(int compute_capability, WgmmaTable table) {
  switch (table) {
    case WgmmaTable::kCodebook:
      return exact_kernels_for<WgmmaKernelsOf<WgmmaTable::kCodebook, Experts>>(compute_capability);
    case WgmmaTable::kTransposed:
      return exact_kernels_for<WgmmaKernelsOf<WgmmaTable::kTransposed, Experts>>(
          compute_capability);
    case WgmmaTable::kGptq:
      return exact_kernels_for<WgmmaKernelsOf<WgmmaTable::kGptq, Experts>>(compute_capability);
    case WgmmaTable::kAwq:
      return exact_kernels_for<WgmmaKernelsOf<WgmmaTable::kAwq, Experts>>(compute_capability);
    case WgmmaTable::kCompressedTensors:
      return exact_kernels_for<WgmmaKernelsOf<WgmmaTable::kCompressedTensors, Experts>>(
          compute_capability);
    case WgmmaTable::kE2m1:
      return exact_kernels_for<WgmmaKernelsOf<WgmmaTable::kE2m1, Experts>>(compute_capability);
  }
  return nullptr;
}

// The kernels may use their shared memory only after this.
cudaError_t allow_shared_memory(const WgmmaKernels &kernels) {
  for (const WgmmaKernel &row : kernels.rows)
    for (const void *kernel : {row.kernels[0], row.kernels[1], row.lora[0], row.lora[1]}) {
      if (kernel == nullptr) continue;
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, row.smem_bytes);
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

// A configuration that the table of each kind of weight has. Each wgmma kernel has a multiprocessor
// to itself, so this one's number of resident clusters is that of all.
constexpr int kEveryKind = config_named("wgmma_128x128");

// The count by device and cluster size, once the kernels of a table are loaded.
std::atomic<int> resident_clusters[kMaxDevices][kMaxClusterSize + 1];

cudaError_t count_clusters(const Device &device, const WgmmaKernel &kernel) {
  for (int size = 2; size <= kMaxClusterSize; ++size) {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(size));
    config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
    config.dynamicSmemBytes = static_cast<size_t>(kernel.smem_bytes);
    config.attrs = &cluster;
    config.numAttrs = 1;
    int count = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel.kernels[0], &config);
    if (error != cudaSuccess) return error;
    resident_clusters[device.index][size].store(count, std::memory_order_relaxed);
  }
  return cudaSuccess;
}

// The tiles, and how they are divided among clusters and their CTAs.
template <class Args>
void split_args(const WgmmaPlan &plan, Args &args) {
  const auto &weight = args.matmul.weight;
  args.tiles = static_cast<int>(plan.tiles());
  args.n_tiles = static_cast<int>(plan.n_tiles);
  args.m_tiles = static_cast<int>(plan.m_tiles);
  // A weight that stays in L2 is read again for each tile of x.
  args.raster_group =
      weight.rows * weight.cols / 2 <= cost_model().l2_kept_bytes ? 1 : std::min(args.m_tiles, 4);
  args.k_tiles = static_cast<int>(ceil_divide(weight.cols, kTileK));
  args.clusters = static_cast<int>(plan.clusters);
  args.cluster_size = plan.cluster_size;
  args.cluster_divisor = FastDivisor::of(plan.cluster_size);
  args.cta_k_tiles = args.k_tiles / plan.cluster_size;
  args.big_ctas = args.k_tiles % plan.cluster_size;
}

template <class W, class Args>
void stream_k_args(const MatmulProblemOf<W> &problem, const WgmmaPlan &plan, Args &args) {
  args.stream_k_tiles = static_cast<int>(plan.stream_k_tiles);
  args.stream_k_cta_k_tiles = static_cast<int>(plan.stream_k_tiles * args.k_tiles / plan.clusters);
  args.stream_k_big_ctas = static_cast<int>(plan.stream_k_tiles * args.k_tiles % plan.clusters);
  args.flags = static_cast<uint64_t *>(problem.workspace);
  args.signature = next_signature();
  args.partials = reinterpret_cast<float4 *>(static_cast<uint8_t *>(problem.workspace) +
                                             MatmulWorkspace(problem).flags_bytes());
}

// Boxes of a step. One row of x may have any stride.
template <class W>
cudaError_t make_x_map(const MatmulProblemOf<W> &problem, int box_rows, TensorMap &map) {
  const int64_t cols = problem.weight.cols;
  const int64_t pitch = problem.m == 1 ? ceil_divide(cols, 8) * 8 : problem.x_stride;
  return make_tensor_map({problem.x, problem.m, cols * 2}, pitch * 2, kStepK * 2, box_rows, map);
}

// The adapter's maps, where the kernels take one.
template <class W, class Args>
cudaError_t set_lora([[maybe_unused]] const MatmulProblemOf<W> &problem,
                     [[maybe_unused]] int tile_n, [[maybe_unused]] int x_box_rows,
                     [[maybe_unused]] Args &args) {
  if constexpr (kTakesLora<W>) {
    if (problem.lora.rank == 0) return cudaSuccess;
    args.lora.k_tiles = static_cast<int>(ceil_divide(problem.lora.rank, kLoraTileK));
    args.lora.k_steps = static_cast<int>(ceil_divide(problem.lora.rank, 16));
    void *const workspace = lora_workspace(problem);
    const int64_t stride = lora_stride(problem.lora);
    const LoraMatrix out = lora_out_for_tma(LoraProblem(problem), workspace);
    const cudaError_t error = make_tensor_map({out.data, out.rows, out.ranks * 2}, out.stride * 2,
                                              kLoraTileK * 2, tile_n, args.lora.out_map);
    if (error != cudaSuccess) return error;
    return make_tensor_map({workspace, problem.m, stride * 2}, stride * 2, kStepK * 2, x_box_rows,
                           args.lora.product_map);
  }
  return cudaSuccess;
}

template <class W>
cudaError_t launch_kind(const MatmulTarget &target, const MatmulProblemOf<W> &problem,
                        const typename ArgsOf<W>::Matmul &matmul, const MatmulChoice &choice) {
  const MatmulConfig &config = kMatmulConfigs[choice.config];
  const WgmmaKernel &kernel = (*find_wgmma_kernels(target.device.compute_capability,
                                                   table_of(problem.weight), false))[choice.config];
  typename ArgsOf<W>::Wgmma args{};
  args.matmul = matmul;
  args.y_vectors = is_multiple(matmul.y, 16) && (matmul.m == 1 || matmul.y_stride % 8 == 0);
  split_args(choice.plan, args);
  if (is_stream_k(choice.config)) stream_k_args(problem, choice.plan, args);
  cudaError_t error = set_weight(problem.weight, problem.weight, problem.dtype, config, args);
  if (error == cudaSuccess) error = make_x_map(problem, kernel.x_box_rows, args.x_map);
  if (error == cudaSuccess) error = set_lora(problem, config.tile_n, kernel.x_box_rows, args);
  if (error != cudaSuccess) return error;
  const auto &kernels = problem.lora.rank > 0 ? kernel.lora : kernel.kernels;
  return launch(
      {kernels[problem.dtype - NF4_DTYPE_FP16], choice.plan.clusters * choice.plan.cluster_size,
       kernel.threads, true, target.stream, kernel.smem_bytes,
       is_stream_k(choice.config) ? 1 : choice.plan.cluster_size},
      args);
}

}  // namespace

const WgmmaKernels *find_wgmma_kernels(int compute_capability, WgmmaTable table, bool experts) {
  return experts ? find<true>(compute_capability, table) : find<false>(compute_capability, table);
}

cudaError_t load_wgmma_kernels(const Device &device, WgmmaTable table, bool experts) {
  static ContextFlag loaded[2][kWgmmaTableCount];
  ContextFlag &flag = loaded[experts][static_cast<int>(table)];
  if (flag.has(device.index)) return cudaSuccess;
  const WgmmaKernels &kernels = *find_wgmma_kernels(device.compute_capability, table, experts);
  if (const cudaError_t error = allow_shared_memory(kernels)) return error;
  if (!experts)
    if (const cudaError_t error = count_clusters(device, kernels[kEveryKind])) return error;
  flag.set(device.index);
  return cudaSuccess;
}

void read_resident_clusters(const Device &device, GpuFacts &gpu) {
  for (int size = 2; size <= kMaxClusterSize; ++size)
    gpu.resident_clusters[size] =
        resident_clusters[device.index][size].load(std::memory_order_relaxed);
}

template <class W, class Args>
cudaError_t set_weight(const W &weight, const W &stack, nf4_dtype dtype, const MatmulConfig &config,
                       Args &args) {
  args.decode = decode_args(weight, dtype, config);
  args.k_tiles = static_cast<int>(ceil_divide(weight.cols, kTileK));
  args.scale_vectors = has_scale_vectors(weight);
  return make_weight_map(stack, config.tile_n, args.weight_map);
}
template cudaError_t set_weight(const Weight &, const Weight &, nf4_dtype, const MatmulConfig &,
                                WgmmaArgs &);
template cudaError_t set_weight(const TransposedWeight &, const TransposedWeight &, nf4_dtype,
                                const MatmulConfig &, WgmmaArgs &);
template cudaError_t set_weight(const Int4Weight &, const Int4Weight &, nf4_dtype,
                                const MatmulConfig &, Int4WgmmaArgs &);

cudaError_t launch_wgmma(const MatmulTarget &target, const MatmulProblem &problem,
                         const MatmulArgs &matmul, const MatmulChoice &choice) {
  return launch_kind(target, problem, matmul, choice);
}
cudaError_t launch_wgmma(const MatmulTarget &target, const Int4MatmulProblem &problem,
                         const Int4MatmulArgs &matmul, const MatmulChoice &choice) {
  return launch_kind(target, problem, matmul, choice);
}
cudaError_t launch_wgmma(const MatmulTarget &target, const GradProblem &problem,
                         const MatmulArgs &matmul, const MatmulChoice &choice) {
  return launch_kind(target, problem, matmul, choice);
}

}  // namespace nf4::cuda
