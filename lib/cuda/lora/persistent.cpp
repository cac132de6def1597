#include "cuda/lora/persistent.hpp"

#include <algorithm>

#include "cuda/lora/persistent_kernels.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"

namespace nf4::cuda {
namespace {

// They are in one group of multiprocessors, so that they leave the base product as many clusters
// as can be.
constexpr int kCluster = 4;
// For each of these rows of x, rounded up, a cluster: then p is there when the base product's first
// tiles need it.
constexpr int64_t kRowsOfCluster = 1024;
constexpr int64_t kMaxRows = 4096;
// Of up to so many rows each CTA of the base product has about one tile; of more, the CTAs that
// start when these are done have a tile less.
constexpr int64_t kRowsOfOneTile = 1024;
// Up to so many rows of x a skinny kernel multiplies without an adapter, and p is small.
constexpr int64_t kFewRows = 16;
constexpr int64_t kRowsOfNarrowTiles = 256;

const LoraPersistentKernels *kernels_on(const Device &device) {
  return exact_kernels_for<LoraPersistentKernels>(device.compute_capability);
}

int in_bytes(const LoraProblem &problem) { return problem.in.is_fp32 ? 4 : 2; }

bool has_tensor_maps(const LoraProblem &problem) {
  const Lora &lora = problem.lora;
  const bool rows_of_in = problem.gradient ? lora.rank * in_bytes(problem) % 16 == 0 &&
                                                 has_vectors(lora.b, lora.b_stride, lora.dtype)
                                           : has_vectors(lora.a, lora.a_stride, lora.dtype);
  return rows_of_in && problem.cols % 8 == 0 && is_multiple(problem.x, 16) &&
         (problem.m == 1 || problem.x_stride % 8 == 0);
}

cudaError_t make_maps(const LoraProblem &problem, int tile_m, LoraPersistentArgs &args) {
  const int64_t cols = problem.cols, x_stride = problem.m == 1 ? cols : problem.x_stride;
  const cudaError_t error = make_tensor_map({problem.x, problem.m, cols * 2}, x_stride * 2,
                                            kPersistentStep * 2, tile_m, args.x_map);
  if (error != cudaSuccess) return error;
  const LoraFactor &in = problem.in;
  const int bytes = in_bytes(problem);
  if (problem.gradient)
    return make_tensor_map({in.data, cols, problem.lora.rank * bytes}, in.stride * bytes,
                           kPersistentRanks * bytes, kPersistentStep, args.in_map);
  return make_tensor_map({in.data, problem.lora.rank, cols * bytes}, in.rank_stride * bytes, 128,
                         kPersistentRanks, args.in_map);
}

}  // namespace

LoraPlan plan_lora(const Device &device, const LoraProblem &problem) {
  const int64_t ctas = ceil_divide(problem.m, kRowsOfCluster) * kCluster;
  const bool few_rows = problem.m <= kFewRows && !problem.gradient;
  if (kernels_on(device) == nullptr || problem.dtype == NF4_DTYPE_FP32 ||
      problem.lora.rank > kPersistentRanks || few_rows || problem.m > kMaxRows ||
      ctas * 4 > device.multiprocessors || !has_tensor_maps(problem))
    return {};
  return {static_cast<int>(ctas), problem.m <= kRowsOfOneTile};
}

cudaError_t launch_persistent_lora(const LaunchTarget &target, const LoraProblem &problem,
                                   const LoraProductArgs &product, int ctas) {
  if (const cudaError_t error = load_persistent_lora(target.device)) return error;
  const bool wide = problem.m > kRowsOfNarrowTiles;
  const int tile_m = kPersistentTileM[wide];
  LoraPersistentArgs args{};
  args.product = product;
  args.product.product_ctas = ctas;
  args.product.copy_ctas =
      static_cast<int>(ceil_divide(args.product.copy_ctas, kCluster) * kCluster);
  args.tiles = static_cast<int>(ceil_divide(problem.m, tile_m));
  if (const cudaError_t error = make_maps(problem, tile_m, args)) return error;
  const bool fp32 = problem.in.is_fp32;
  const void *const kernel =
      kernels_on(target.device)->of[problem.dtype - NF4_DTYPE_FP16][fp32][problem.gradient][wide];
  return launch({kernel, ctas + args.product.copy_ctas, kLoraProductThreads, true, target.stream,
                 lora_smem(tile_m, fp32).bytes, kCluster},
                args);
}

// They may use more shared memory than the default only after this, once a device.
cudaError_t load_persistent_lora(const Device &device) {
  static ContextFlag loaded;
  const LoraPersistentKernels *const kernels = kernels_on(device);
  if (kernels == nullptr || loaded.has(device.index)) return cudaSuccess;
  const auto *const list = reinterpret_cast<const void *const *>(kernels);
  for (size_t i = 0; i < sizeof *kernels / sizeof *list; ++i) {
    const cudaError_t error = cudaFuncSetAttribute(
        list[i], cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  loaded.set(device.index);
  return cudaSuccess;
}

}  // namespace nf4::cuda
