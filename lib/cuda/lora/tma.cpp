#include "cuda/lora/tma.hpp"

#include <algorithm>

#include "cuda/lora/tma_kernels.hpp"
#include "cuda/lora/vectors.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/shared_memory.hpp"

namespace nf4::cuda {
namespace {

// The CTAs of a cluster are in one group of multiprocessors (GPC). Clusters of this size leave room
// for as many of the wgmma kernel's clusters as possible.
constexpr int kCluster = 4;
// The rows of x per cluster, rounded up: then p is complete when the wgmma kernel's first tiles
// end. Measured with 4096 and 14336 columns on H200s.
constexpr int64_t kRowsOfCluster = 1024;
constexpr int64_t kMaxRows = 8192;
// The rate of an H200's multiprocessor and the cost of a launch, which the choice of the wgmma
// kernel's plan needs.
constexpr double kBytesPerCycle = 50, kStartCycles = 2000;
// With at most this many rows, usually a skinny kernel multiplies x, and p is small.
constexpr int64_t kFewRows = 16;
constexpr int64_t kRowsOfNarrowTiles = 256;

static_assert(lora_smem(kPersistentTileM[0], true).bytes <= 227 << 10);
static_assert(lora_smem(kPersistentTileM[1], true).bytes <= 227 << 10);
static_assert(2 * (wide_lora_smem(kWideRanks[1], true).bytes + 1024) <= 228 << 10);
static_assert(2 * (wide_lora_smem(kWideRanks[1], false).bytes + 1024) <= 228 << 10);

const LoraTmaKernels *kernels_on(const Device &device) {
  return exact_kernels_for<LoraTmaKernels>(device.compute_capability);
}

int in_bytes(const LoraProblem &problem) { return problem.in.is_fp32 ? 4 : 2; }

// The matrix by which x is multiplied, as it is stored.
struct InMatrix {
  int64_t rows;
  int64_t row_bytes;
  int64_t pitch;  // in bytes; a single row may have any stride
};
InMatrix in_matrix(const LoraProblem &problem) {
  const LoraFactor &in = problem.in;
  const int64_t bytes = in_bytes(problem), rank = problem.lora.rank;
  if (problem.gradient) return {problem.cols, rank * bytes, in.stride * bytes};
  return {rank, problem.cols * bytes, (rank == 1 ? problem.cols : in.rank_stride) * bytes};
}

bool can_map(const LoraProblem &problem) {
  constexpr int64_t kMaxPitch = int64_t{1} << 40;  // in bytes
  const InMatrix in = in_matrix(problem);
  return is_multiple(problem.in.data, 16) && in.row_bytes % 16 == 0 && in.pitch % 16 == 0 &&
         in.pitch < kMaxPitch && problem.cols % 8 == 0 && has_x_vectors(problem) &&
         (problem.m == 1 || problem.x_stride * 2 < kMaxPitch);
}

cudaError_t make_maps(const LoraProblem &problem, int tile_m, int ranks, LoraTmaArgs &args) {
  const int64_t cols = problem.cols, x_stride = problem.m == 1 ? cols : problem.x_stride;
  const cudaError_t error = make_tensor_map({problem.x, problem.m, cols * 2}, x_stride * 2,
                                            kLoraStep * 2, tile_m, args.x_map);
  if (error != cudaSuccess) return error;
  const InMatrix in = in_matrix(problem);
  const int box_bytes = problem.gradient ? lora_rank_box_bytes(ranks, in_bytes(problem)) : 128;
  return make_tensor_map({problem.in.data, in.rows, in.row_bytes}, in.pitch, box_bytes,
                         problem.gradient ? kLoraStep : ranks, args.in_map);
}

}  // namespace

LoraPlan plan_lora(const Device &device, const LoraProblem &problem) {
  const int64_t ctas = ceil_divide(problem.m, kRowsOfCluster) * kCluster;
  const bool few_rows = problem.m <= kFewRows && !problem.gradient;
  if (kernels_on(device) == nullptr || problem.dtype == NF4_DTYPE_FP32 ||
      problem.lora.rank > kPersistentRanks || few_rows || problem.m > kMaxRows ||
      ctas * 4 > device.multiprocessors || !can_map(problem))
    return {};
  const double bytes = 2.0 * static_cast<double>(problem.m) * static_cast<double>(problem.cols);
  return {static_cast<int>(ctas),
          kStartCycles + bytes / (static_cast<double>(ctas) * kBytesPerCycle)};
}

cudaError_t launch_persistent_lora(const LaunchTarget &target, const LoraProblem &problem,
                                   const LoraProductArgs &product, int ctas) {
  if (const cudaError_t error = load_lora_tma_kernels(target.device)) return error;
  const bool wide = problem.m > kRowsOfNarrowTiles;
  const int tile_m = kPersistentTileM[wide];
  LoraTmaArgs args{};
  args.product = product;
  args.product.product_ctas = ctas;
  // Each CTA that copies has a multiprocessor to itself, as it has the shared memory of a product's
  // CTA.
  const int64_t copy_ctas =
      std::min(args.product.copy_ctas, target.device.multiprocessors - ctas - kCluster);
  args.product.copy_ctas = static_cast<int>(ceil_divide(copy_ctas, kCluster) * kCluster);
  args.tiles = static_cast<int>(ceil_divide(problem.m, tile_m));
  if (const cudaError_t error = make_maps(problem, tile_m, kPersistentRanks, args)) return error;
  const bool fp32 = problem.in.is_fp32;
  const void *const kernel =
      kernels_on(target.device)
          ->persistent[problem.dtype - NF4_DTYPE_FP16][fp32][problem.gradient][wide];
  return launch({kernel, ctas + args.product.copy_ctas, kLoraProductThreads, true, target.stream,
                 lora_smem(tile_m, fp32).bytes, kCluster},
                args);
}

namespace {
// One CTA per multiprocessor, as long as each has a few steps. With clusters of 8, two CTAs
// per multiprocessor are not all resident at a time.
int wide_cluster_log2(int64_t tiles, int64_t steps, const Device &device) {
  constexpr int kLeastSteps = 4;
  int log2 = 0;
  while (log2 < kMaxLoraClusterLog2 && kLeastSteps << (log2 + 1) <= steps &&
         tiles << (log2 + 1) <= device.multiprocessors)
    ++log2;
  return log2;
}
}  // namespace

bool can_run_wide_lora(const LaunchTarget &target, const LoraProblem &problem) {
  // Coordinates have 31 bits; those of columns count bytes.
  constexpr int64_t kMaxRows = int64_t{1} << 30, kMaxCols = int64_t{1} << 28;
  const int compute_capability = target.device.compute_capability;
  return kernels_on(target.device) != nullptr &&
         is_best_family(*target.family, compute_capability) && problem.dtype != NF4_DTYPE_FP32 &&
         problem.lora.rank > kPersistentRanks && problem.m <= kMaxRows &&
         problem.cols <= kMaxCols && can_map(problem);
}

cudaError_t launch_wide_lora(const LaunchTarget &target, const LoraProblem &problem,
                             const LoraProductArgs &product) {
  if (const cudaError_t error = load_lora_tma_kernels(target.device)) return error;
  const bool more_ranks = problem.lora.rank > kWideRanks[0], fp32 = problem.in.is_fp32;
  const int ranks = kWideRanks[more_ranks];
  LoraTmaArgs args{};
  args.product = product;
  args.product.rank_chunks = static_cast<int>(ceil_divide(problem.lora.rank, ranks));
  const int64_t tiles = ceil_divide(problem.m, kWideTileM) * args.product.rank_chunks;
  const int64_t steps = ceil_divide(problem.cols, kLoraStep);
  args.product.cluster_log2 = wide_cluster_log2(tiles, steps, target.device);
  const int cluster = 1 << args.product.cluster_log2;
  args.product.copy_ctas = static_cast<int>(ceil_divide(product.copy_ctas, cluster) * cluster);
  args.product.product_ctas = static_cast<int>(tiles * cluster);
  if (const cudaError_t error = make_maps(problem, kWideTileM, ranks, args)) return error;
  const void *const kernel =
      kernels_on(target.device)
          ->wide[problem.dtype - NF4_DTYPE_FP16][fp32][problem.gradient][more_ranks];
  return launch({kernel, args.product.product_ctas + args.product.copy_ctas, kWideThreads, true,
                 target.stream, wide_lora_smem(ranks, fp32).bytes, cluster},
                args);
}

cudaError_t load_lora_tma_kernels(const Device &device) {
  static ContextFlag known;
  const LoraTmaKernels *const kernels = kernels_on(device);
  return kernels == nullptr ? cudaSuccess : allow_shared_memory(device, *kernels, known);
}

}  // namespace nf4::cuda
