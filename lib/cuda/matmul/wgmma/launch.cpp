#include "cuda/matmul/wgmma/launch.hpp"

#include <algorithm>
#include <atomic>
#include <limits>

#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul/workspace.hpp"
#include "cuda/nf4_gpu_families.hpp"

namespace nf4::cuda {
#if NF4_HAVE_SM90A
namespace {

constexpr int kHopper = 90;                      // the compute capability
constexpr int64_t kMaxCols = int64_t{1} << 22;   // offsets within 256 rows have 31 bits
constexpr int64_t kMaxRows = int64_t{1} << 30;   // of x or the weight
constexpr int64_t kMaxPitch = int64_t{1} << 39;  // elements: a tensor map's bytes
constexpr int64_t kL2KeptBytes = 32 << 20;       // of a weight, in L2 beside x and y

// Cycles of an H200, from times at 1.755 GHz. With these constants the configuration of least
// cycles was, for 24 products, within 4 % of the fastest of all that were timed.
constexpr double kStart = 6000, kTile = 1500;
// Of a K-tile, by configuration; those of 176 and 208 rows are interpolated.
constexpr double kKTile[] = {1200, 1440, 2040, 1065, 1590, 1780, 1930, 2090, 2290,
                             2430, 2650, 1620, 1810, 1960, 2130, 2330, 2460, 2690};
static_assert(std::size(kKTile) == kMatmulConfigCount - kFirstWgmma);

const WgmmaKernel &kernel_of(int config) { return kWgmmaKernels.of[config - kFirstWgmma]; }
double k_tile_cycles(int config) { return kKTile[config - kFirstWgmma]; }

struct Tiles {
  int64_t n, m;
  int64_t count() const { return n * m; }
};

Tiles tiles_of(const MatmulConfig &config, const MatmulProblem &problem) {
  return {ceil_divide(problem.weight.rows, config.tile_n), ceil_divide(problem.m, config.tile_m)};
}

int64_t k_tiles_of(const MatmulProblem &problem) {
  return ceil_divide(problem.weight.cols, kTileK);
}

// How the tiles of a configuration are divided among clusters.
struct WgmmaPlan {
  Tiles tiles;
  int64_t stream_k_tiles;  // 0 if the configuration is not stream-K
  int64_t clusters;
  int cluster_size;
  double cycles;  // estimated
};

// By device and cluster size, once its kernels are loaded: the clusters that it holds at a time. It
// differs from one H200 to another, as their groups of multiprocessors differ in size.
std::atomic<int> resident_clusters[kMaxDevices][kMaxClusterSize + 1];

cudaError_t count_clusters(const Device &device) {
  const WgmmaKernel &kernel = kernel_of(kFirstWgmma);  // each has a multiprocessor to itself
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

// Each CTA makes whole tiles; where tiles are few, clusters do.
void plan_persistent(int config, const MatmulProblem &problem, const Device &device,
                     WgmmaPlan &plan) {
  const MatmulConfig &tile = kMatmulConfigs[config];
  const int64_t tiles = plan.tiles.count(), k_tiles = k_tiles_of(problem);
  plan.clusters = std::clamp(tiles, int64_t{1}, int64_t{device.multiprocessors});
  plan.cycles = kStart + static_cast<double>(ceil_divide(tiles, plan.clusters)) *
                             (kTile + static_cast<double>(k_tiles) * k_tile_cycles(config));
  for (int size = 2; size <= kMaxClusterSize; ++size) {
    if (k_tiles < size * MatmulWorkspace::kMinKTiles ||
        tiles > resident_clusters[device.index][size].load(std::memory_order_relaxed))
      continue;
    // A CTA sends all of its sums but a share, and there are more to wait for.
    constexpr double kExchange = 1000, kCta = 200, kSum = 0.5;
    const double sent = static_cast<double>(tile.tile_m) * tile.tile_n * (1 - 1.0 / size);
    const double cycles = kStart + kTile +
                          static_cast<double>(ceil_divide(k_tiles, size)) * k_tile_cycles(config) +
                          kExchange + kCta * size + kSum * sent;
    if (cycles >= plan.cycles) continue;
    plan.clusters = tiles;
    plan.cluster_size = size;
    plan.cycles = cycles;
  }
}

// All CTAs share the tiles of the last wave, and of the one before it if there is one: then partial
// sums are stored long before they are reduced.
void plan_stream_k(int config, const MatmulProblem &problem, const Device &device,
                   WgmmaPlan &plan) {
  const MatmulConfig &tile = kMatmulConfigs[config];
  const int64_t tiles = plan.tiles.count(), k_tiles = k_tiles_of(problem);
  plan.clusters = device.multiprocessors;
  plan.stream_k_tiles = std::min(tiles, plan.clusters + tiles % plan.clusters);
  const auto share = static_cast<double>(ceil_divide(plan.stream_k_tiles * k_tiles, plan.clusters));
  const auto whole = static_cast<double>((tiles - plan.stream_k_tiles) / plan.clusters);
  // A CTA stores its sums once, and reduces others' once, or for each CTA that has a part.
  constexpr double kExchange = 1500, kSum = 0.28, kPeer = 0.06;
  const auto peers = static_cast<double>(ceil_divide(plan.clusters, plan.stream_k_tiles) - 1);
  const double sums = static_cast<double>(tile.tile_m) * tile.tile_n;
  plan.cycles = kStart + kExchange + (kSum + kPeer * peers) * sums + (whole + 2) * kTile +
                (whole * static_cast<double>(k_tiles) + share) * k_tile_cycles(config);
}

WgmmaPlan plan_wgmma(int config, const MatmulProblem &problem, const Device &device) {
  WgmmaPlan plan{};
  plan.tiles = tiles_of(kMatmulConfigs[config], problem);
  plan.cluster_size = 1;
  if (is_stream_k(config))
    plan_stream_k(config, problem, device, plan);
  else
    plan_persistent(config, problem, device, plan);
  return plan;
}

// Whether each CTA gets enough K-tiles, and a slot in the workspace.
bool can_stream_k(const MatmulConfig &config, const MatmulProblem &problem, const Device &device) {
  const int64_t tiles = tiles_of(config, problem).count(), ctas = device.multiprocessors;
  const MatmulWorkspace workspace(problem);
  return tiles % ctas != 0 && tiles * k_tiles_of(problem) >= ctas * MatmulWorkspace::kMinKTiles &&
         workspace.ctas >= ctas &&
         workspace.cta_bytes >= int64_t{config.tile_n} * config.tile_m * int64_t{sizeof(float)};
}

// The value of this launch's flags, and of no other launch of the process. Uninitialized memory
// holds other values.
uint64_t next_signature() {
  constexpr uint64_t kFirst = 0x9e3779b97f4a7c15;
  static std::atomic<uint64_t> next{kFirst};
  return next.fetch_add(1, std::memory_order_relaxed);
}

void stream_k_args(const MatmulProblem &problem, const WgmmaPlan &plan, int k_tiles,
                   WgmmaArgs &args) {
  args.stream_k_tiles = static_cast<int>(plan.stream_k_tiles);
  args.k_tiles = k_tiles;
  args.stream_k_cta_k_tiles = static_cast<int>(plan.stream_k_tiles * k_tiles / plan.clusters);
  args.stream_k_big_ctas = static_cast<int>(plan.stream_k_tiles * k_tiles % plan.clusters);
  args.flags = static_cast<uint64_t *>(problem.workspace);
  args.signature = next_signature();
  args.partials = reinterpret_cast<float4 *>(static_cast<uint8_t *>(problem.workspace) +
                                             MatmulWorkspace(problem).flags_bytes());
}

// Of skinny_16, from 19.8 us at 14336x4096, 7.9 at 4096x4096 and 20.5 at 4096x14336, within 2 %; at
// 28672x8192 it took 61.5, 13 % less, where others take less still.
double skinny16_cycles(const Weight &weight, const Device &device) {
  constexpr double kStart = 5100, kElement = 0.0675;
  const int64_t rows = ceil_divide(weight.rows, device.multiprocessors);
  return kStart + kElement * static_cast<double>(rows * weight.cols);
}

}  // namespace

bool wgmma_can_run(const MatmulProblem &problem, int which, const Device &device) {
  const Weight &weight = problem.weight;
  const MatmulConfig &config = kMatmulConfigs[which];
  // Past a row's end codes, scales and x are 0. Their product is 0 unless a caller's codebook
  // begins with an infinity or a NaN.
  const int whole = weight.codebook != nullptr ? kTileK : kStepK;
  // LutScaledBf16 is for the formats' own codebooks.
  if (weight.codebook != nullptr && problem.dtype == NF4_DTYPE_BF16 &&
      config.scale_on == ScaleOn::kWeights)
    return false;
  return device.compute_capability == kHopper && device.shared_bytes >= kWgmmaSmemBytes &&
         weight.cols > 0 && weight.cols % whole == 0 && weight.cols <= kMaxCols &&
         weight.rows <= kMaxRows && problem.m <= kMaxRows && weight.blocksize() >= kStepK &&
         is_multiple(weight.packed, 16) && has_x_vectors(problem) &&
         (problem.m == 1 || problem.x_stride < kMaxPitch) &&
         ceil_divide(weight.rows, 128) * ceil_divide(problem.m, 16) <=
             std::numeric_limits<int>::max() / 2 &&
         (!is_stream_k(which) || can_stream_k(config, problem, device));
}

cudaError_t choose_wgmma(const MatmulProblem &problem, const Device &device, int &config) {
  const cudaError_t error = load_wgmma_kernels(device);
  if (error != cudaSuccess) return error;
  double least = std::numeric_limits<double>::infinity();
  if (config == kSkinny16) {
    constexpr double kMargin = 0.95;  // for the error of both estimates
    least = kMargin * skinny16_cycles(problem.weight, device);
  }
  for (int i = kFirstWgmma; i < kMatmulConfigCount; ++i) {
    if (!wgmma_can_run(problem, i, device)) continue;
    const WgmmaPlan plan = plan_wgmma(i, problem, device);
    if (plan.cycles >= least) continue;
    least = plan.cycles;
    config = i;
  }
  return cudaSuccess;
}

cudaError_t load_wgmma_kernels(const Device &device) {
  if (device.compute_capability != kHopper) return cudaSuccess;
  static ContextFlag known;
  if (known.has(device.index)) return cudaSuccess;
  for (const WgmmaKernel &config : kWgmmaKernels.of)
    for (const void *kernel : config.kernels) {
      const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes);
      if (error != cudaSuccess) return error;
    }
  const cudaError_t error = count_clusters(device);
  if (error != cudaSuccess) return error;
  known.set(device.index);
  return cudaSuccess;
}

cudaError_t launch_wgmma(const MatmulProblem &problem, const MatmulArgs &matmul, int which,
                         const Device &device, cudaStream_t stream) {
  cudaError_t error = load_wgmma_kernels(device);
  if (error != cudaSuccess) return error;
  const MatmulConfig &config = kMatmulConfigs[which];
  const WgmmaKernel &kernel = kernel_of(which);
  const WgmmaPlan plan = plan_wgmma(which, problem, device);
  const WeightView &weight = matmul.weight;
  WgmmaArgs args{};
  args.matmul = matmul;
  const Format &format = kFormats[weight.format_row];
  std::copy(format.codebook.begin(), format.codebook.end(), args.codebook.exact);
  args.codebook.rounded = config.scale_on == ScaleOn::kSums
                              ? rounded_codebook(weight, problem.dtype)
                              : format.fp16_with_one;
  args.tiles = static_cast<int>(plan.tiles.count());
  args.n_tiles = static_cast<int>(plan.tiles.n);
  args.m_tiles = static_cast<int>(plan.tiles.m);
  // A weight that stays in L2 is read again for each tile of x.
  args.raster_group = weight.rows * weight.cols / 2 <= kL2KeptBytes ? 1 : std::min(args.m_tiles, 4);
  const int k_tiles = static_cast<int>(k_tiles_of(problem));
  args.clusters = static_cast<int>(plan.clusters);
  args.cluster_size = plan.cluster_size;
  args.cluster_divisor = FastDivisor::of(plan.cluster_size);
  args.cta_k_tiles = k_tiles / plan.cluster_size;
  args.big_ctas = k_tiles % plan.cluster_size;
  if (is_stream_k(which)) stream_k_args(problem, plan, k_tiles, args);
  args.scale_vectors = weight.blocksize_log2 == 6 && weight.cols % 512 == 0 &&
                       is_multiple(weight.absmax, weight.nested_absmax == nullptr ? 16 : 8) &&
                       (weight.nested_absmax == nullptr || weight.nested_blocksize_log2 >= 3);
  args.y_vectors = is_multiple(matmul.y, 16) && (matmul.m == 1 || matmul.y_stride % 8 == 0);
  error = make_tensor_map({weight.packed, weight.rows, weight.cols / 2}, weight.cols / 2,
                          kTileK / 2, config.tile_n, args.weight_map);
  if (error != cudaSuccess) return error;
  // One row of x may have any stride.
  const int64_t pitch = matmul.m == 1 ? weight.cols : matmul.x_stride;
  error = make_tensor_map({matmul.x, matmul.m, weight.cols * 2}, pitch * 2, kStepK * 2,
                          kernel.x_box_rows, args.x_map);
  if (error != cudaSuccess) return error;
  return launch(
      {kernel.kernels[problem.dtype - NF4_DTYPE_FP16], int64_t{args.clusters} * plan.cluster_size,
       kernel.threads, true, stream, kernel.smem_bytes, plan.cluster_size},
      args);
}

#else

bool wgmma_can_run(const MatmulProblem &, int, const Device &) { return false; }
cudaError_t choose_wgmma(const MatmulProblem &, const Device &, int &) {
  return cudaErrorNotSupported;
}
cudaError_t launch_wgmma(const MatmulProblem &, const MatmulArgs &, int, const Device &,
                         cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t load_wgmma_kernels(const Device &) { return cudaSuccess; }

#endif
}  // namespace nf4::cuda
