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
constexpr int64_t kKeptBytes = 32 << 20;             // in L2, beside x and y

const WideShape &wide_shape(MatmulShape shape) { return kWideShapes[shape - kWide16Tall]; }

struct Tiles {
  int64_t of_rows, of_x;
  int64_t count() const { return of_rows * of_x; }
};

Tiles tiles_of(const WideShape &shape, const MatmulProblem &problem) {
  return {ceil_divide(problem.weight.rows, shape.rows), ceil_divide(problem.m, shape.columns)};
}

// How the tiles of a shape become work of clusters.
struct WidePlan {
  Tiles tiles;
  int64_t streamed_tiles;  // 0 if the shape is not streamed
  int64_t clusters;
  int splits;     // the blocks of a cluster
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
constexpr double kStart = 6000, kTile = 1500;

int64_t slabs_of(const MatmulProblem &problem) {
  return ceil_divide(problem.weight.cols, kSlabColumns);
}

// Does the workspace have a slot for each of so many blocks?
bool has_slots(const WideShape &shape, const MatmulProblem &problem, int64_t blocks) {
  const MatmulWorkspace workspace(problem);
  return workspace.slots >= blocks &&
         workspace.slot_bytes >= int64_t{shape.rows} * shape.columns * int64_t{sizeof(float)};
}

// Each block makes whole tiles; clusters of blocks do, where tiles are few.
void plan_whole_tiles(const WideShape &shape, const MatmulProblem &problem, const Device &device,
                      WidePlan &plan) {
  const int64_t tiles = plan.tiles.count(), slabs = slabs_of(problem);
  plan.clusters = std::clamp(tiles, int64_t{1}, int64_t{device.multiprocessors});
  plan.cycles = kStart + static_cast<double>(ceil_divide(tiles, plan.clusters)) *
                             (kTile + static_cast<double>(slabs) * shape.slab_cycles);
  for (int splits = 2; splits <= kMaxSplits; ++splits) {
    if (slabs < splits * MatmulWorkspace::kMinSlabs ||
        tiles > resident_clusters[device.index][splits].load(std::memory_order_relaxed))
      continue;
    // A block sends all of its sums but a share, and there are more to wait for.
    constexpr double kExchange = 1000, kBlock = 200, kSum = 0.5;
    const double sent = static_cast<double>(shape.columns) * shape.rows * (1 - 1.0 / splits);
    const double cycles = kStart + kTile +
                          static_cast<double>(ceil_divide(slabs, splits)) * shape.slab_cycles +
                          kExchange + kBlock * splits + kSum * sent;
    if (cycles >= plan.cycles) continue;
    plan.clusters = tiles;
    plan.splits = splits;
    plan.cycles = cycles;
  }
}

// All blocks share the tiles of the last turn, and of the turn before it if there is one: what
// blocks leave for others is there long before it is wanted then.
void plan_streamed_tiles(const WideShape &shape, const MatmulProblem &problem, const Device &device,
                         WidePlan &plan) {
  const int64_t tiles = plan.tiles.count(), slabs = slabs_of(problem);
  plan.clusters = device.multiprocessors;
  plan.streamed_tiles = std::min(tiles, plan.clusters + tiles % plan.clusters);
  const auto share = static_cast<double>(ceil_divide(plan.streamed_tiles * slabs, plan.clusters));
  const auto whole = static_cast<double>((tiles - plan.streamed_tiles) / plan.clusters);
  // A block leaves its sums once, and takes others' once, or for each block that has a part.
  constexpr double kExchange = 1500, kSum = 0.28, kMore = 0.06;
  const auto more = static_cast<double>(ceil_divide(plan.clusters, plan.streamed_tiles) - 1);
  const double sums = static_cast<double>(shape.columns) * shape.rows;
  plan.cycles = kStart + kExchange + (kSum + kMore * more) * sums + (whole + 2) * kTile +
                (whole * static_cast<double>(slabs) + share) * shape.slab_cycles;
}

WidePlan plan_wide(const WideShape &shape, const MatmulProblem &problem, const Device &device) {
  WidePlan plan{};
  plan.tiles = tiles_of(shape, problem);
  plan.splits = 1;
  if (shape.streamed)
    plan_streamed_tiles(shape, problem, device, plan);
  else
    plan_whole_tiles(shape, problem, device, plan);
  return plan;
}

// Is there enough for each block to share?
bool can_stream(const WideShape &shape, const MatmulProblem &problem, const Device &device) {
  const int64_t tiles = tiles_of(shape, problem).count(), blocks = device.multiprocessors;
  return tiles % blocks != 0 && tiles * slabs_of(problem) >= blocks * MatmulWorkspace::kMinSlabs &&
         has_slots(shape, problem, blocks);
}

// Flags of a launch's blocks are this, and of no other launch of the process. Those that memory
// has by chance are other numbers.
uint64_t next_signature() {
  constexpr uint64_t kFirst = 0x9e3779b97f4a7c15;
  static std::atomic<uint64_t> next{kFirst};
  return next.fetch_add(1, std::memory_order_relaxed);
}

void share_tiles(const MatmulProblem &problem, const WidePlan &plan, int slabs, WideArgs &wide) {
  wide.streamed_tiles = static_cast<int>(plan.streamed_tiles);
  wide.slabs = slabs;
  wide.stream_slabs = static_cast<int>(plan.streamed_tiles * slabs / plan.clusters);
  wide.more_streams = static_cast<int>(plan.streamed_tiles * slabs % plan.clusters);
  wide.flags = static_cast<uint64_t *>(problem.workspace);
  wide.signature = next_signature();
  wide.partials = reinterpret_cast<float4 *>(static_cast<uint8_t *>(problem.workspace) +
                                             MatmulWorkspace(problem).flags_bytes());
}

// Of kFew16, from 19.8 us at 14336x4096, 7.9 at 4096x4096 and 20.5 at 4096x14336, within 2 %; at
// 28672x8192 it took 61.5, 13 % less, where others take less still.
double few16_cycles(const Weight &weight, const Device &device) {
  constexpr double kStart = 5100, kEach = 0.0675;
  const int64_t rows = ceil_divide(weight.rows, device.multiprocessors);
  return kStart + kEach * static_cast<double>(rows * weight.cols);
}

}  // namespace

bool wide_takes(const MatmulProblem &problem, MatmulShape which, const Device &device) {
  const Weight &weight = problem.weight;
  const WideShape &shape = wide_shape(which);
  // Past a row's end codes, scales and x are 0, whose product is 0 unless a caller's codebook
  // begins with what is not finite.
  const int whole = weight.codebook != nullptr ? kSlabColumns : kStepColumns;
  if (weight.codebook != nullptr && problem.dtype == NF4_DTYPE_BF16 && !shape.scaled_sums)
    return false;
  return device.compute_capability == kHopper && device.shared_bytes >= kWideSharedBytes &&
         weight.cols > 0 && weight.cols % whole == 0 && weight.cols <= kWideMaxCols &&
         weight.rows <= kWideMaxRows && problem.m <= kWideMaxRows &&
         weight.blocksize() >= kStepColumns && is_multiple(weight.packed, 16) &&
         has_x_vectors(problem) && (problem.m == 1 || problem.x_stride < kWideMaxPitch) &&
         ceil_divide(weight.rows, 128) * ceil_divide(problem.m, 16) <=
             std::numeric_limits<int>::max() / 2 &&
         (!shape.streamed || can_stream(shape, problem, device));
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
    const WidePlan plan = plan_wide(wide_shape(shape), problem, device);
    if (plan.cycles >= least) continue;
    least = plan.cycles;
    best = shape;
  }
  return cudaSuccess;
}

cudaError_t load_wide_kernels(const Device &device) {
  if (device.compute_capability != kHopper) return cudaSuccess;
  static ContextFlag known;
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

cudaError_t launch_wide(const MatmulProblem &problem, const MatmulArgs &args, MatmulShape which,
                        const Device &device, cudaStream_t stream) {
  cudaError_t error = load_wide_kernels(device);
  if (error != cudaSuccess) return error;
  const WideShape &shape = wide_shape(which);
  const WidePlan plan = plan_wide(shape, problem, device);
  WideArgs wide{};
  wide.matmul = args;
  std::copy_n(nf4_codebook(args.format), kCodebookSize, wide.codebook);
  wide.rounded = shape.scaled_sums ? rounded_codebook(args.format, problem.dtype)
                                   : codebook_with_one(args.format);
  wide.tiles = static_cast<int>(plan.tiles.count());
  wide.row_tiles = static_cast<int>(plan.tiles.of_rows);
  wide.x_tiles = static_cast<int>(plan.tiles.of_x);
  // A weight that stays in L2 is read again for each tile of x.
  wide.x_group = args.rows * args.cols / 2 <= kKeptBytes ? 1 : std::min(wide.x_tiles, 4);
  const int slabs = static_cast<int>(ceil_divide(args.cols, kSlabColumns));
  wide.clusters = static_cast<int>(plan.clusters);
  wide.splits = plan.splits;
  wide.inverse_splits = inverse_of(plan.splits);
  wide.block_slabs = slabs / plan.splits;
  wide.more_slabs = slabs % plan.splits;
  if (shape.streamed) share_tiles(problem, plan, slabs, wide);
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
                          shape.columns / shape.boxes, wide.x);
  if (error != cudaSuccess) return error;
  return launch(
      {shape.kernels[problem.dtype - NF4_DTYPE_FP16], int64_t{wide.clusters} * plan.splits,
       shape.threads, true, stream, shape.shared_bytes, plan.splits},
      wide);
}

#else

bool wide_takes(const MatmulProblem &, MatmulShape, const Device &) { return false; }
cudaError_t best_wide(const MatmulProblem &, const Device &, MatmulShape &) {
  return cudaErrorNotSupported;
}
cudaError_t launch_wide(const MatmulProblem &, const MatmulArgs &, MatmulShape, const Device &,
                        cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t load_wide_kernels(const Device &) { return cudaSuccess; }

#endif
}  // namespace nf4::cuda
