// The rules behind nf4_*_path. Figures: docs/design/path.md.
#include "cuda/path.hpp"

#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/mma/tile.hpp"

namespace nf4::cuda {
namespace {

nf4_path fused_if(bool fused) { return fused ? NF4_PATH_FUSED : NF4_PATH_DENSE; }

// mma_64x64 waits for memory in every K-tile. It is faster than two launches while each CTA has
// few of them.
template <class W>
bool mma_is_short(const MatmulProblemOf<W> &problem, const GpuFacts &gpu) {
  const int64_t tiles =
      ceil_divide(problem.weight.rows, kMmaTileN) * ceil_divide(problem.m, kMmaTileM);
  const int64_t waves = ceil_divide(tiles, gpu.multiprocessors);
  const int64_t k_tiles = ceil_divide(problem.weight.cols, kMmaTileK);
  return waves * k_tiles <= (gpu.tensor_cores && problem.dtype != NF4_DTYPE_FP32 ? 4 : 1);
}

// Few rows of x times integers have an mma kernel that clusters of CTAs share along K.
bool has_mma_few(const Int4MatmulProblem &problem, const GpuFacts &gpu) {
  return gpu.tensor_cores && problem.m <= kFewRowsOfX;
}

// With an adapter of these ranks the gradient's kernels save q A, too: up to so many rows of dY,
// unless the last of a few waves of tiles, of 256 rows by 128 columns, is short.
bool adapter_pays(const GradProblem &problem, const GpuFacts &gpu) {
  constexpr int64_t kRows = 4096;
  const int rank = problem.lora.rank;
  if ((rank != 8 && rank != 16 && rank != 32) || problem.m > kRows) return false;
  const int64_t tiles = ceil_divide(problem.m, 256) * ceil_divide(problem.weight.rows, 128);
  const double waves = static_cast<double>(tiles) / gpu.multiprocessors;
  const double missing = static_cast<double>(ceil_divide(tiles, gpu.multiprocessors)) - waves;
  return waves <= 1 || waves >= 5 || missing <= 0.25;
}

// Mean rows of an expert from which dequantizing all experts takes less time than their kernels,
// which read a weight anew for every few rows of x.
template <class W>
nf4_path path_of_experts(const GroupedProblemOf<W> &problem, int config, const GpuFacts &gpu) {
  if (is_wgmma(config)) return NF4_PATH_FUSED;
  const double rows = static_cast<double>(problem.m) / problem.experts;
  return fused_if(rows <= (gpu.tensor_cores ? 96.0 : 0.25));
}

}  // namespace

nf4_path path_of(const MatmulProblem &problem, int config, const GpuFacts &gpu) {
  return fused_if(config != kMma64x64 || mma_is_short(problem, gpu));
}

nf4_path path_of(const Int4MatmulProblem &problem, int config, const GpuFacts &gpu) {
  return fused_if(config != kMma64x64 || has_mma_few(problem, gpu) || mma_is_short(problem, gpu));
}

nf4_path path_of(const GradProblem &problem, int config, const GpuFacts &gpu) {
  constexpr int64_t kWgmmaRows = 1024;  // of dY; with more, decoding costs more than a dense weight
  if (problem.dtype == NF4_DTYPE_FP32 || config == kMma64x64) return NF4_PATH_DENSE;
  return fused_if(is_skinny(config) || problem.m <= kWgmmaRows || adapter_pays(problem, gpu));
}

nf4_path path_of(const GroupedProblem &problem, int config, const GpuFacts &gpu) {
  return path_of_experts(problem, config, gpu);
}
nf4_path path_of(const GroupedGradProblem &problem, int config, const GpuFacts &gpu) {
  return path_of_experts(problem, config, gpu);
}
nf4_path path_of(const Int4GroupedProblem &problem, int config, const GpuFacts &gpu) {
  return path_of_experts(problem, config, gpu);
}

// The kernel for tensor cores reads x and dY once for up to so many ranks.
nf4_path path_of(const LoraGradProblem &problem, const GpuFacts &gpu) {
  constexpr int kRanks = 64;
  const bool tensor_cores = problem.dtype == NF4_DTYPE_FP32 ? gpu.wgmma : gpu.tensor_cores;
  return fused_if(tensor_cores && problem.rank <= kRanks);
}

}  // namespace nf4::cuda
