#include "cuda/matmul/wgmma/launch.hpp"

#include <algorithm>
#include <atomic>

#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/runtime/launch.hpp"

namespace nf4::cuda {
namespace {

const WgmmaKernels &kernels_on(const Device &device, const Weight &) {
  return *exact_kernels_for<WgmmaKernels>(device.compute_capability);
}

template <nf4_int4_layout Layout>
const WgmmaKernels &int4_kernels_on(const Device &device) {
  return *exact_kernels_for<Int4WgmmaKernels<Layout>>(device.compute_capability);
}
const WgmmaKernels &kernels_on(const Device &device, const Int4Weight &weight) {
  if (weight.layout == NF4_INT4_GPTQ) return int4_kernels_on<NF4_INT4_GPTQ>(device);
  if (weight.layout == NF4_INT4_AWQ) return int4_kernels_on<NF4_INT4_AWQ>(device);
  return int4_kernels_on<NF4_INT4_COMPRESSED_TENSORS>(device);
}

// By device and cluster size, once the kernels are loaded.
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

LutCodebook decode_args(const WeightView &weight, nf4_dtype dtype, ScaleOn scale_on) {
  const Format &format = kFormats[weight.format_row];
  LutCodebook codebook{};
  std::copy(format.codebook.begin(), format.codebook.end(), codebook.exact);
  codebook.rounded =
      scale_on == ScaleOn::kSums ? rounded_codebook(weight, dtype) : format.fp16_with_one;
  return codebook;
}
Int4DecodeArgs decode_args(const Int4View &weight, nf4_dtype, ScaleOn) {
  return {static_cast<int>(ceil_divide(weight.group_size, kStepK))};
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

// The first value of this launch's flags, which no other launch of the process uses. Uninitialized
// memory holds other values.
uint64_t next_signature() {
  constexpr uint64_t kFirst = 0x9e3779b97f4a7c15;
  static std::atomic<uint64_t> next{kFirst};
  return next.fetch_add(MatmulWorkspace::kSignatures, std::memory_order_relaxed);
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

// Whether ScaleLoader::load_vectors can be used: each step is a block, and vectors are aligned.
bool has_scale_vectors(const WeightView &weight) {
  const bool nested = weight.nested_absmax != nullptr;
  return weight.blocksize_log2 == 6 && weight.cols % 512 == 0 &&
         is_multiple(weight.absmax, nested ? 8 : 16) &&
         (!nested || weight.nested_blocksize_log2 >= 3);
}
bool has_scale_vectors(const Int4View &) { return false; }

// Boxes of a K-tile.
cudaError_t make_weight_map(const WeightView &weight, int tile_n, TensorMap &map) {
  return make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2, kTileK / 2,
                         tile_n, map);
}
cudaError_t make_weight_map(const Int4View &weight, int tile_n, TensorMap &map) {
  if (weight.layout == NF4_INT4_GPTQ)
    return make_word_tensor_map({weight.packed, weight.cols / 8, weight.rows * 4}, tile_n,
                                kTileK / 8, map);
  if (weight.layout == NF4_INT4_AWQ)
    return make_tensor_map({weight.packed, weight.cols, weight.rows / 2}, weight.rows / 2,
                           tile_n / 2, kTileK, map);
  return make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2, kTileK / 2,
                         tile_n, map);
}

template <class Args>
cudaError_t make_tensor_maps(int tile_n, int x_box_rows, Args &args) {
  const auto &matmul = args.matmul;
  const cudaError_t error = make_weight_map(matmul.weight, tile_n, args.weight_map);
  if (error != cudaSuccess) return error;
  // One row of x may have any stride.
  const int64_t cols = matmul.weight.cols, pitch = matmul.m == 1 ? cols : matmul.x_stride;
  return make_tensor_map({matmul.x, matmul.m, cols * 2}, pitch * 2, kStepK * 2, x_box_rows,
                         args.x_map);
}

template <class Args, class W>
cudaError_t launch_kind(const MatmulTarget &target, const MatmulProblemOf<W> &problem,
                        const decltype(Args::matmul) &matmul, const MatmulChoice &choice) {
  const MatmulConfig &config = kMatmulConfigs[choice.config];
  const WgmmaKernel &kernel =
      kernels_on(target.device, problem.weight).of[choice.config - kFirstWgmma];
  Args args{};
  args.matmul = matmul;
  args.decode = decode_args(matmul.weight, problem.dtype, config.scale_on);
  split_args(choice.plan, args);
  if (is_stream_k(choice.config)) stream_k_args(problem, choice.plan, args);
  args.scale_vectors = has_scale_vectors(matmul.weight);
  args.y_vectors = is_multiple(matmul.y, 16) && (matmul.m == 1 || matmul.y_stride % 8 == 0);
  if (const cudaError_t error = make_tensor_maps(config.tile_n, kernel.x_box_rows, args))
    return error;
  return launch(
      {kernel.kernels[problem.dtype - NF4_DTYPE_FP16],
       choice.plan.clusters * choice.plan.cluster_size, kernel.threads, true, target.stream,
       kernel.smem_bytes, is_stream_k(choice.config) ? 1 : choice.plan.cluster_size},
      args);
}

cudaError_t allow_shared_memory(const WgmmaKernels &kernels) {
  for (const WgmmaKernel &config : kernels.of)
    for (const void *kernel : config.kernels) {
      if (kernel == nullptr) continue;
      const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes);
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

// The kernels of codebooks are loaded, or of integers of a layout.
ContextFlag loaded[NF4_INT4_COMPRESSED_TENSORS + 1];
ContextFlag &loaded_of(const Weight &) { return loaded[0]; }
ContextFlag &loaded_of(const Int4Weight &weight) { return loaded[weight.layout]; }

template <class W>
cudaError_t load_kind(const Device &device, const W &weight, GpuFacts &gpu) {
  ContextFlag &flag = loaded_of(weight);
  if (!flag.has(device.index)) {
    const WgmmaKernels &kernels = kernels_on(device, weight);
    if (const cudaError_t error = allow_shared_memory(kernels)) return error;
    // Each kernel has a multiprocessor to itself, so one speaks for all, of any kind.
    if (const cudaError_t error = count_clusters(device, kernels.of[0])) return error;
    flag.set(device.index);
  }
  for (int size = 2; size <= kMaxClusterSize; ++size)
    gpu.resident_clusters[size] =
        resident_clusters[device.index][size].load(std::memory_order_relaxed);
  return cudaSuccess;
}

}  // namespace

cudaError_t load_wgmma_kernels(const Device &device, const Weight &weight, GpuFacts &gpu) {
  return load_kind(device, weight, gpu);
}
cudaError_t load_wgmma_kernels(const Device &device, const Int4Weight &weight, GpuFacts &gpu) {
  return load_kind(device, weight, gpu);
}

cudaError_t launch_wgmma(const MatmulTarget &target, const MatmulProblem &problem,
                         const MatmulArgs &matmul, const MatmulChoice &choice) {
  return launch_kind<WgmmaArgs>(target, problem, matmul, choice);
}
cudaError_t launch_wgmma(const MatmulTarget &target, const Int4MatmulProblem &problem,
                         const Int4MatmulArgs &matmul, const MatmulChoice &choice) {
  return launch_kind<Int4WgmmaArgs>(target, problem, matmul, choice);
}

}  // namespace nf4::cuda
