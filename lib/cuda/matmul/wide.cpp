#include "cuda/matmul/wide.hpp"

#include <algorithm>
#include <atomic>
#include <limits>

#include "cuda/matmul/wide_args.hpp"
#include "nf4_gpu_families.hpp"

namespace nf4::cuda {
#if NF4_HAVE_SM90A
namespace {

constexpr int kHopper = 90;                          // the compute capability
constexpr int64_t kWideMaxCols = int64_t{1} << 22;   // 256 rows have offsets of 31 bits
constexpr int64_t kWideMaxRows = int64_t{1} << 30;   // of x or the weight
constexpr int64_t kWideMaxPitch = int64_t{1} << 39;  // elements: a tensor map's bytes
constexpr int64_t kMinSlabs = 4;                     // of a split
constexpr int64_t kKeptBytes = 32 << 20;             // in L2, beside x and y

const WideShape &wide_shape(MatmulShape shape) { return kWideShapes[shape - kWide16Tall]; }

// How the tiles of a shape become work of clusters.
struct WidePlan {
  int64_t row_tiles;
  int64_t x_tiles;
  int64_t whole_tiles;
  int splits;
  double cycles;  // estimated
};

// Of a device, once its kernels are loaded: how many clusters of so many blocks it holds at a
// time, which differs from one H200 to another, as their groups of multiprocessors are not of one
// size.
std::atomic<int> resident_clusters[kMaxDevices][kMaxSplits + 1];

cudaError_t count_clusters(const Device &device) {
  const WideShape &shape = wide_shape(kWide32Tall);  // each has a multiprocessor to itself
  for (int blocks = 2; blocks <= kMaxSplits; ++blocks) {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
    config.attrs = &cluster;
    config.numAttrs = 1;
    int count = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, shape.kernels[0], &config);
    if (error != cudaSuccess) return error;
    resident_clusters[device.index][blocks].store(count, std::memory_order_relaxed);
  }
  return cudaSuccess;
}

// Cycles are those of an H200 (sm90a.cu). With these constants the shape of least cycles was, of
// all that were timed for 24 products, within 4 % of the fastest.
WidePlan plan_wide(const WideShape &shape, int64_t rows, int64_t cols, int64_t m,
                   const Device &device) {
  WidePlan plan{ceil_divide(rows, shape.rows), ceil_divide(m, shape.columns), 0, 1, 0};
  const int64_t slabs = ceil_divide(cols, kSlabColumns);
  const int64_t tiles = plan.row_tiles * plan.x_tiles;
  for (int splits = 2; splits <= kMaxSplits; ++splits)
    if (slabs >= splits * kMinSlabs &&
        tiles <= resident_clusters[device.index][splits].load(std::memory_order_relaxed))
      plan.splits = splits;
  const int64_t blocks = device.multiprocessors;
  const int64_t rest = tiles % blocks;
  plan.whole_tiles = shape.halves && tiles > blocks && 2 * rest <= blocks ? tiles - rest : tiles;
  constexpr double kStart = 6000, kTile = 1500, kHalf = 0.65;
  const double turns = static_cast<double>(ceil_divide(plan.whole_tiles, blocks)) +
                       (plan.whole_tiles < tiles ? kHalf : 0);
  const auto slabs_of_block = static_cast<double>(ceil_divide(slabs, plan.splits));
  plan.cycles = kStart + turns * (kTile + slabs_of_block * shape.slab_cycles);
  if (plan.splits > 1) {
    // A block sends all of its sums but a share, and there are more to wait for.
    constexpr double kExchange = 1000, kBlock = 200, kSum = 0.5;
    const double sent = static_cast<double>(shape.columns) * shape.rows * (1 - 1.0 / plan.splits);
    plan.cycles += kExchange + kBlock * plan.splits + kSum * sent;
  }
  return plan;
}

// Of kFew16, from 19.1 us at 14336x4096, 7.4 at 4096x4096, 18.9 at 4096x14336 and 59.5 at
// 28672x8192, within 7 %.
double few16_cycles(const Weight &weight, const Device &device) {
  constexpr double kStart = 6000, kEach = 0.056;
  const int64_t rows = ceil_divide(weight.rows, device.multiprocessors);
  return kStart + kEach * static_cast<double>(rows * weight.cols);
}

}  // namespace

bool wide_takes(const MatmulProblem &problem, MatmulShape shape, const Device &device) {
  const Weight &weight = problem.weight;
  // Past a row's end codes, scales and x are 0, whose product is 0 unless a caller's codebook
  // begins with what is not finite.
  const int whole = weight.codebook != nullptr ? kSlabColumns : kStepColumns;
  if (weight.codebook != nullptr && problem.dtype == NF4_DTYPE_BF16 &&
      !wide_shape(shape).scaled_sums)
    return false;
  return device.compute_capability == kHopper && device.shared_bytes >= kWideSharedBytes &&
         weight.cols > 0 && weight.cols % whole == 0 && weight.cols <= kWideMaxCols &&
         weight.rows <= kWideMaxRows && problem.m <= kWideMaxRows &&
         weight.blocksize() >= kStepColumns && is_multiple(weight.packed, 16) &&
         has_x_vectors(problem) && (problem.m == 1 || problem.x_stride < kWideMaxPitch) &&
         ceil_divide(weight.rows, 128) * ceil_divide(problem.m, 16) <=
             std::numeric_limits<int>::max() / 2;
}

cudaError_t best_wide(const MatmulProblem &problem, const Device &device, MatmulShape &best) {
  const cudaError_t error = load_wide_kernels(device);
  if (error != cudaSuccess) return error;
  double least = std::numeric_limits<double>::infinity();
  if (best == kFew16) {
    constexpr double kMargin = 0.95;  // for what both estimates may be wrong by
    least = kMargin * few16_cycles(problem.weight, device);
  }
  for (int i = kWide16Tall; i < kMatmulShapes; ++i) {
    const auto shape = static_cast<MatmulShape>(i);
    if (!wide_takes(problem, shape, device)) continue;
    const WidePlan plan =
        plan_wide(wide_shape(shape), problem.weight.rows, problem.weight.cols, problem.m, device);
    if (plan.cycles >= least) continue;
    least = plan.cycles;
    best = shape;
  }
  return cudaSuccess;
}

cudaError_t load_wide_kernels(const Device &device) {
  if (device.compute_capability != kHopper) return cudaSuccess;
  static SetInContext known;
  if (known.has(device.index)) return cudaSuccess;
  for (const WideShape &shape : kWideShapes)
    for (const void *kernel : shape.kernels) {
      const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
      if (error != cudaSuccess) return error;
    }
  const cudaError_t error = count_clusters(device);
  if (error != cudaSuccess) return error;
  known.set(device.index);
  return cudaSuccess;
}

cudaError_t launch_wide(const MatmulArgs &args, nf4_dtype dtype, MatmulShape which,
                        const Device &device, cudaStream_t stream) {
  cudaError_t error = load_wide_kernels(device);
  if (error != cudaSuccess) return error;
  const WideShape &shape = wide_shape(which);
  const WidePlan plan = plan_wide(shape, args.rows, args.cols, args.m, device);
  WideArgs wide{};
  wide.matmul = args;
  std::copy_n(nf4_codebook(args.format), kCodebookSize, wide.codebook);
  wide.rounded =
      shape.scaled_sums ? rounded_codebook(args.format, dtype) : codebook_with_one(args.format);
  wide.tiles = static_cast<int>(plan.row_tiles * plan.x_tiles);
  wide.whole_tiles = static_cast<int>(plan.whole_tiles);
  wide.row_tiles = static_cast<int>(plan.row_tiles);
  wide.x_tiles = static_cast<int>(plan.x_tiles);
  // A weight that stays in L2 is read again for each tile of x.
  wide.x_group = args.rows * args.cols / 2 <= kKeptBytes ? 1 : std::min(wide.x_tiles, 4);
  const int slabs = static_cast<int>(ceil_divide(args.cols, kSlabColumns));
  const int work = 2 * wide.tiles - wide.whole_tiles;
  wide.clusters = plan.splits > 1 ? wide.tiles : std::min(work, device.multiprocessors);
  wide.splits = plan.splits;
  wide.inverse_splits = inverse_of(plan.splits);
  wide.block_slabs = slabs / plan.splits;
  wide.more_slabs = slabs % plan.splits;
  wide.scale_groups = args.blocksize_log2 == 6 && args.cols % 512 == 0 &&
                      is_multiple(args.absmax, args.nested_absmax == nullptr ? 16 : 8) &&
                      (args.nested_absmax == nullptr || args.nested_blocksize_log2 >= 3);
  wide.y_vectors = is_multiple(args.y, 16) && (args.m == 1 || args.y_stride % 8 == 0);
  error = make_tensor_map({args.packed, args.rows, args.cols / 2}, args.cols / 2, kSlabColumns / 2,
                          shape.rows, wide.packed);
  if (error != cudaSuccess) return error;
  // One row of x may have any stride.
  const int64_t pitch = args.m == 1 ? args.cols : args.x_stride;
  error = make_tensor_map({args.x, args.m, args.cols * 2}, pitch * 2, kStepColumns * 2,
                          shape.columns / (shape.halves ? 2 : 1), wide.x);
  if (error != cudaSuccess) return error;
  return launch({shape.kernels[dtype - NF4_DTYPE_FP16], int64_t{wide.clusters} * plan.splits,
                 shape.threads, true, stream, shape.shared_bytes, plan.splits},
                wide);
}

#else

bool wide_takes(const MatmulProblem &, MatmulShape, const Device &) { return false; }
cudaError_t best_wide(const MatmulProblem &, const Device &, MatmulShape &) {
  return cudaErrorNotSupported;
}
cudaError_t launch_wide(const MatmulArgs &, nf4_dtype, MatmulShape, const Device &, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t load_wide_kernels(const Device &) { return cudaSuccess; }

#endif
}  // namespace nf4::cuda
