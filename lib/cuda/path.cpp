// Decides which way a product is expected to take less time on a GPU (nf4_path): libnf4's kernel,
// or dequantize and a dense product of the caller's. Only this file decides it. docs/design/path.md
// has the figures.
#include <type_traits>

#include "cuda/backend.hpp"
#include "cuda/costs/gpu.hpp"
#include "cuda/dequant/int4_choose.hpp"
#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/matmul.hpp"
#include "cuda/matmul/mma/tile.hpp"
#include "cuda/matmul/multistage/limit.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/matmul_grouped/choose.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

nf4_path fused_if(bool fused) { return fused ? NF4_PATH_FUSED : NF4_PATH_DENSE; }

// With tensor cores, mma_64x64 multiplies few K-tiles of integers in the time of two launches. It
// waits for memory in each K-tile.
bool mma_is_short(const Int4MatmulProblem &problem, const GpuFacts &gpu) {
  constexpr int64_t kMost = 4;
  if (!gpu.tensor_cores || problem.dtype == NF4_DTYPE_FP32) return false;
  const int64_t tiles =
      ceil_divide(problem.weight.rows, kMmaTileN) * ceil_divide(problem.m, kMmaTileM);
  const int64_t waves = ceil_divide(tiles, gpu.multiprocessors);
  return waves * ceil_divide(problem.weight.cols, kMmaTileK) <= kMost;
}

// The kernel that dequantizes integers in small groups, or in another order of columns, takes
// longer than mma_64x64 up to this many rows of x.
bool dequant_is_slow(const Int4MatmulProblem &problem, const GpuFacts &gpu) {
  constexpr int64_t kRows = 256;
  return gpu.tensor_cores && !can_align(problem.weight) && problem.m <= kRows;
}

// With an adapter of these ranks, the gradient's kernels also save a pass over dX. That pays up to
// this many rows of dY, unless the last of a few waves of tiles, of 256 rows by 128 columns, is
// short.
bool adapter_pays(const GradProblem &problem, const GpuFacts &gpu) {
  constexpr int64_t kRows = 4096;
  const int rank = problem.lora.rank;
  if ((rank != 8 && rank != 16 && rank != 32) || problem.m > kRows) return false;
  const int64_t tiles = ceil_divide(problem.m, 256) * ceil_divide(problem.weight.rows, 128);
  const double waves = static_cast<double>(tiles) / gpu.multiprocessors;
  const double missing = static_cast<double>(ceil_divide(tiles, gpu.multiprocessors)) - waves;
  return waves <= 1 || waves >= 5 || missing <= 0.25;
}

// Up to this many mean rows of an expert, the experts' kernels are expected to take less time than
// dequantizing all experts. They decode a weight anew for every 16 to 128 rows of x. On GPUs of
// compute capability 9.x and 10.x torch has one kernel for all dense experts. Elsewhere it
// multiplies them one by one, which takes longer.
double most_expert_rows(const LaunchTarget &target, int config) {
  if (is_mma(config) && !target.family->tensor_cores) return 4;
  const int major = target.device.compute_capability / 10;
  return major == 9 || major == 10 ? 32 : 128;
}

// The gradient of experts in MXFP4 and NVFP4, which has no kernel but mma_64x64.
template <class W>
bool is_slow_gradient(const GroupedProblemOf<W> &problem, int config) {
  if constexpr (std::is_same_v<W, TransposedWeight>)
    return is_mma(config) && problem.weight.has_scale_bytes();
  return false;
}

template <class W>
nf4_path path_of(const GroupedProblemOf<W> &problem, int config, const MatmulTarget &target) {
  constexpr double kMostOfSlow = 0.5;
  const double rows = static_cast<double>(problem.m) / problem.experts;
  const double most =
      is_slow_gradient(problem, config) ? kMostOfSlow : most_expert_rows(target, config);
  return fused_if(is_wgmma(config) || rows <= most);
}

template <class W>
int64_t multistage_rows(const MatmulProblemOf<W> &problem, const MatmulTarget &target) {
  const bool gradient = kind_of(problem.weight) == WeightKind::kTransposed;
  const MultistageLimit limit{target.device.compute_capability, !target.gpu.tensor_cores, gradient,
                              problem.lora.rank > 0};
  return limit.rows(problem.weight.rows * problem.weight.cols);
}

// Up to 8 rows the workspace has no room for the sums of tiles that CTAs would share.
template <class W>
bool multistage_pays(const MatmulProblemOf<W> &problem, const MatmulTarget &target) {
  return problem.m > kMatmulConfigs[kSkinny8].tile_m &&
         problem.m <= multistage_rows(problem, target);
}

// The workspace has room for few rows of dY, too.
bool multistage_pays(const GradProblem &problem, const MatmulTarget &target) {
  return problem.m <= multistage_rows(problem, target);
}

// Up to 8 rows, where CTAs share no tiles, a CTA takes as long for 256 rows of a weight of integers
// as dequantize and a dense product take for 24 times as many.
bool whole_tiles_pay(const Int4MatmulProblem &problem, const GpuFacts &gpu) {
  constexpr int64_t kTilesOfDense = 24;
  const int64_t tiles = ceil_divide(problem.weight.rows, kMatmulConfigs[kFirstMultistage].tile_n);
  return problem.m <= kMatmulConfigs[kSkinny8].tile_m &&
         tiles >= kTilesOfDense * ceil_divide(tiles, gpu.multiprocessors);
}

nf4_path path_of(const MatmulProblem &problem, int config, const MatmulTarget &target) {
  return fused_if(is_multistage(config) ? multistage_pays(problem, target) : !is_mma(config));
}

nf4_path path_of(const Int4MatmulProblem &problem, int config, const MatmulTarget &target) {
  if (dequant_is_slow(problem, target.gpu) || mma_is_short(problem, target.gpu))
    return NF4_PATH_FUSED;
  if (is_multistage(config))
    return fused_if(multistage_pays(problem, target) || whole_tiles_pay(problem, target.gpu));
  return fused_if(!is_mma(config));
}

nf4_path path_of(const GradProblem &problem, int config, const MatmulTarget &target) {
  // Rows of dY; with more, decoding costs more than a dense weight.
  constexpr int64_t kWgmmaRows = 1024;
  if (problem.dtype == NF4_DTYPE_FP32 || is_mma(config)) return NF4_PATH_DENSE;
  if (is_multistage(config)) return fused_if(multistage_pays(problem, target));
  return fused_if(is_skinny(config) || problem.m <= kWgmmaRows ||
                  adapter_pays(problem, target.gpu));
}

// The kernel for tensor cores reads x and dY once for up to this many ranks.
nf4_path path_of(const LoraGradProblem &problem, const GpuFacts &gpu) {
  constexpr int kRanks = 64;
  const bool tensor_cores = problem.dtype == NF4_DTYPE_FP32 ? gpu.wgmma : gpu.tensor_cores;
  return fused_if(tensor_cores && problem.rank <= kRanks);
}

// Finds the path from the configuration that choose(target, config) fills in, which the launch of
// the problem would use. choose returns a cudaError_t.
template <class Problem, class Choose>
nf4_status find_path(const Problem &problem, int device, nf4_path &path, const Choose &choose) {
  MatmulTarget target{};
  if (const nf4_status status = find_matmul_device(device, target)) return status;
  const CurrentDevice current(device);
  if (const nf4_status status = current.status()) return status;
  int config = kMma64x64;
  const cudaError_t error = choose(target, config);
  if (error != cudaSuccess) return fail_cuda(error, "loading the kernels of products");
  path = path_of(problem, config, target);
  return NF4_STATUS_OK;
}

template <class W>
nf4_status find_matmul_path(const MatmulProblemOf<W> &problem, int device, nf4_path &path) {
  StrategyTimes times;
  int chosen = kMma64x64;
  const auto choose = [&](const MatmulTarget &target, int &config) {
    times = times_on(target, problem);
    const cudaError_t error = choose_matmul(target, problem, times, config);
    chosen = config;
    return error;
  };
  if (const nf4_status status = find_path(problem, device, path, choose)) return status;
  if (times.knows(kDenseStrategy) && times.knows(strategy_of(chosen)))
    path = fused_if(times.us[strategy_of(chosen)] <= times.us[kDenseStrategy]);
  return NF4_STATUS_OK;
}

template <class W>
nf4_status find_grouped_path(const GroupedProblemOf<W> &problem, int device, nf4_path &path) {
  return find_path(problem, device, path, [&](const MatmulTarget &target, int &config) {
    config = choose_grouped(problem, target.gpu);
    return cudaSuccess;
  });
}

}  // namespace

nf4_status matmul_path(const MatmulProblem &problem, int device, nf4_path &path) {
  return find_matmul_path(problem, device, path);
}
nf4_status matmul_path(const Int4MatmulProblem &problem, int device, nf4_path &path) {
  return find_matmul_path(problem, device, path);
}

nf4_status matmul_grad_path(const MatmulProblem &given, int device, nf4_path &path) {
  return find_matmul_path(transposed(given), device, path);
}

nf4_status matmul_grouped_path(const GroupedProblem &problem, int device, nf4_path &path) {
  return problem.gradient ? find_grouped_path(transposed(problem), device, path)
                          : find_grouped_path(problem, device, path);
}
nf4_status matmul_grouped_path(const Int4GroupedProblem &problem, int device, nf4_path &path) {
  return find_grouped_path(problem, device, path);
}

nf4_status lora_grad_path(const LoraGradProblem &problem, int device, nf4_path &path) {
  MatmulTarget target{};
  if (const nf4_status status = find_matmul_device(device, target)) return status;
  path = path_of(problem, target.gpu);
  return NF4_STATUS_OK;
}

nf4_status check_gpu(int device) {
  LaunchTarget target{};
  return find_device(device, target);
}

}  // namespace nf4::cuda
