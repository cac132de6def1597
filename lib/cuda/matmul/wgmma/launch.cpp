#include "cuda/matmul/wgmma/launch.hpp"

#include <algorithm>
#include <atomic>

#include "cuda/lora/lora.hpp"
#include "cuda/lora/workspace.hpp"
#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/signature.hpp"

namespace nf4::cuda {

cudaError_t allow_shared_memory(const WgmmaKernels &kernels) {
  for (const WgmmaKernel &config : kernels.of)
    for (const void *kernel :
         {config.kernels[0], config.kernels[1], config.lora[0], config.lora[1]}) {
      if (kernel == nullptr) continue;
      const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes);
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

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
const WgmmaKernels &kernels_on(const Device &device, const TransposedWeight &) {
  return *exact_kernels_for<GradWgmmaKernels>(device.compute_capability);
}

// A configuration that all kinds of weight have.
constexpr int kEveryKind = config_named("wgmma_128x128");

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

template <class W>
ScaleOn scale_on(const W &, const MatmulConfig &config) {
  return config.scale_on;
}
ScaleOn scale_on(const TransposedWeight &, const MatmulConfig &) { return ScaleOn::kWeights; }

LutCodebook decode_args(const WeightView &weight, nf4_dtype dtype, ScaleOn scale_on) {
  const Format &format = kFormats[weight.format_row];
  LutCodebook codebook{};
  std::copy(format.codebook.begin(), format.codebook.end(), codebook.exact);
  const bool around_one = scale_on == ScaleOn::kWeights && dtype == NF4_DTYPE_FP16;
  codebook.rounded = around_one                      ? format.around_one
                     : scale_on == ScaleOn::kWeights ? format.fp16_with_one
                                                     : rounded_codebook(weight, dtype);
  codebook.scale_factor = around_one ? format.around_one.unit : 1.0f;
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

// Whether ScaleLoader::load_vectors can be used: each step is a block, and vectors are aligned. Or
// PairedScales.
bool has_scale_vectors(const Weight &weight) {
  return weight.blocksize_log2 == 6 && weight.cols % 512 == 0 &&
         is_multiple(weight.absmax, weight.nested() ? 8 : 16) &&
         (!weight.nested() || weight.nested_blocksize_log2 >= 3);
}
bool has_scale_vectors(const Int4Weight &) { return false; }
bool has_scale_vectors(const TransposedWeight &weight) {
  return weight.blocksize_log2 == 6 && weight.rows % 128 == 0 &&
         is_multiple(weight.absmax, weight.nested() ? 2 : 8) && weight.nested_blocksize_log2 != 0;
}

// Boxes of a K-tile.
cudaError_t make_weight_map(const Weight &weight, int tile_n, TensorMap &map) {
  return make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2, kTileK / 2,
                         tile_n, map);
}
cudaError_t make_weight_map(const Int4Weight &weight, int tile_n, TensorMap &map) {
  if (weight.layout == NF4_INT4_GPTQ)
    return make_word_tensor_map({weight.packed, weight.cols / 8, weight.rows * 4}, tile_n,
                                kTileK / 8, map);
  if (weight.layout == NF4_INT4_AWQ)
    return make_tensor_map({weight.packed, weight.cols, weight.rows / 2}, weight.rows / 2,
                           tile_n / 2, kTileK, map);
  return make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2, kTileK / 2,
                         tile_n, map);
}
cudaError_t make_weight_map(const TransposedWeight &weight, int tile_n, TensorMap &map) {
  return make_tensor_map({weight.packed, weight.cols, weight.rows / 2}, weight.rows / 2, tile_n / 2,
                         kTileK, map);
}

// Boxes of a step. One row of x may have any stride.
template <class W>
cudaError_t make_x_map(const MatmulProblemOf<W> &problem, int box_rows, TensorMap &map) {
  const int64_t cols = problem.weight.cols;
  const int64_t pitch = problem.m == 1 ? ceil_divide(cols, 8) * 8 : problem.x_stride;
  return make_tensor_map({problem.x, problem.m, cols * 2}, pitch * 2, kStepK * 2, box_rows, map);
}

cudaError_t lora_args(const Int4MatmulProblem &, int, int, Int4WgmmaArgs &) { return cudaSuccess; }
template <class W>
cudaError_t lora_args(const MatmulProblemOf<W> &problem, int tile_n, int x_box_rows,
                      WgmmaArgs &args) {
  if (problem.lora.rank == 0) return cudaSuccess;
  args.lora.k_tiles = static_cast<int>(ceil_divide(problem.lora.rank, kLoraTileK));
  args.lora.k_steps = static_cast<int>(ceil_divide(problem.lora.rank, 16));
  void *const workspace =
      static_cast<uint8_t *>(problem.workspace) + MatmulWorkspace(problem).bytes();
  const int64_t stride = lora_stride(problem.lora);
  const LoraMatrix out = lora_out_for_tma(LoraProblem(problem), workspace);
  const cudaError_t error = make_tensor_map({out.data, out.rows, out.ranks * 2}, out.stride * 2,
                                            kLoraTileK * 2, tile_n, args.lora.out_map);
  if (error != cudaSuccess) return error;
  return make_tensor_map({workspace, problem.m, stride * 2}, stride * 2, kStepK * 2, x_box_rows,
                         args.lora.product_map);
}

template <class Args, class W>
cudaError_t launch_kind(const MatmulTarget &target, const MatmulProblemOf<W> &problem,
                        const decltype(Args::matmul) &matmul, const MatmulChoice &choice) {
  const MatmulConfig &config = kMatmulConfigs[choice.config];
  const WgmmaKernel &kernel =
      kernels_on(target.device, problem.weight).of[choice.config - kFirstWgmma];
  Args args{};
  args.matmul = matmul;
  args.decode = decode_args(matmul.weight, problem.dtype, scale_on(problem.weight, config));
  split_args(choice.plan, args);
  if (is_stream_k(choice.config)) stream_k_args(problem, choice.plan, args);
  args.scale_vectors = has_scale_vectors(problem.weight);
  args.y_vectors = is_multiple(matmul.y, 16) && (matmul.m == 1 || matmul.y_stride % 8 == 0);
  if (const cudaError_t error = make_weight_map(problem.weight, config.tile_n, args.weight_map))
    return error;
  if (const cudaError_t error = make_x_map(problem, kernel.x_box_rows, args.x_map)) return error;
  if (const cudaError_t error = lora_args(problem, config.tile_n, kernel.x_box_rows, args))
    return error;
  const auto &kernels = problem.lora.rank > 0 ? kernel.lora : kernel.kernels;
  return launch(
      {kernels[problem.dtype - NF4_DTYPE_FP16], choice.plan.clusters * choice.plan.cluster_size,
       kernel.threads, true, target.stream, kernel.smem_bytes,
       is_stream_k(choice.config) ? 1 : choice.plan.cluster_size},
      args);
}

// The kernels of codebooks are loaded, or of integers of a layout, or of the gradient.
ContextFlag loaded[NF4_INT4_COMPRESSED_TENSORS + 2];
ContextFlag &loaded_of(const Weight &) { return loaded[0]; }
ContextFlag &loaded_of(const Int4Weight &weight) { return loaded[weight.layout]; }
ContextFlag &loaded_of(const TransposedWeight &) { return loaded[NF4_INT4_COMPRESSED_TENSORS + 1]; }

template <class W>
cudaError_t load_kind(const Device &device, const W &weight, GpuFacts &gpu) {
  ContextFlag &flag = loaded_of(weight);
  if (!flag.has(device.index)) {
    const WgmmaKernels &kernels = kernels_on(device, weight);
    if (const cudaError_t error = allow_shared_memory(kernels)) return error;
    // Each kernel has a multiprocessor to itself, so one speaks for all, of any kind.
    if (const cudaError_t error = count_clusters(device, kernels.of[kEveryKind - kFirstWgmma]))
      return error;
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

cudaError_t load_wgmma_kernels(const Device &device, const TransposedWeight &weight,
                               GpuFacts &gpu) {
  return load_kind(device, weight, gpu);
}

template <class W, class Args>
cudaError_t set_weight(const W &weight, const W &stack, nf4_dtype dtype, const MatmulConfig &config,
                       Args &args) {
  args.decode = decode_args(args.matmul.weight, dtype, scale_on(weight, config));
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
  return launch_kind<WgmmaArgs>(target, problem, matmul, choice);
}
cudaError_t launch_wgmma(const MatmulTarget &target, const Int4MatmulProblem &problem,
                         const Int4MatmulArgs &matmul, const MatmulChoice &choice) {
  return launch_kind<Int4WgmmaArgs>(target, problem, matmul, choice);
}
cudaError_t launch_wgmma(const MatmulTarget &target, const GradProblem &problem,
                         const MatmulArgs &matmul, const MatmulChoice &choice) {
  return launch_kind<WgmmaArgs>(target, problem, matmul, choice);
}

}  // namespace nf4::cuda
