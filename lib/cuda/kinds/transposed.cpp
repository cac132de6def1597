// The gradient, whose weight is W^T: sizes, what its kernels can run, and the costs of experts'
// kernels. matmul/cost_model.hpp has the costs of the wgmma kernels. Calls no CUDA.
#include <limits>

#include "cuda/costs/costs.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/choose.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul_grad/skinny_smem.hpp"
#include "cuda/matmul_grouped/choose.hpp"

namespace nf4::cuda {

// ---- One weight -----------------------------------------------------------------------------

// The columns of W^T need not be whole steps, but its rows, which share scales.
MatmulSize size_of(const GradProblem &problem) {
  const Weight &weight = problem.weight;
  return {problem.dtype,
          problem.m,
          weight.rows,
          ceil_divide(weight.cols, kStepK) * kStepK,
          weight.rows % kStepK == 0 ? weight.blocksize() : 1,
          kind_of(problem.weight)};
}

// Strips are whole, two blocks share a nested block, and numbers of blocks have 31 bits.
bool skinny_can_run(const GradProblem &problem, const GpuFacts &gpu, int config) {
  constexpr int64_t kMaxSide = int64_t{1} << 30;
  constexpr int64_t kMaxPitch = int64_t{1} << 39;  // elements: a tensor map's bytes
  const Weight &weight = problem.weight;
  const int max_m = kMatmulConfigs[config].tile_m;
  if (weight.rows > kMaxSide || weight.cols > kMaxSide) return false;
  if (!gpu.tensor_maps || config == kSkinny2 || problem.m > max_m) return false;
  if (problem.dtype == NF4_DTYPE_FP32 || weight.codebook != nullptr || weight.cols == 0)
    return false;
  if (problem.lora.rank > 0) return false;  // their epilogue does not add it
  return weight.blocksize() == kGradBlocksize && weight.nested_blocksize_log2 != 0 &&
         weight.rows % strip_rows(kGradWarpsN) == 0 &&
         weight.blocks < std::numeric_limits<int>::max() / 2 - 8 * weight.rows &&
         is_multiple(weight.packed, 16) && is_multiple(weight.absmax, weight.nested() ? 2 : 8) &&
         has_x_vectors(problem) && (problem.m == 1 || problem.x_stride < kMaxPitch) &&
         gpu.shared_bytes >= grad_strip_smem(max_m).bytes;
}

// Not asked for: skinny16_always_wins().
double skinny16_cycles(const TransposedWeight &, const GpuFacts &, const CostModel &) { return 0; }

bool takes_skinny2_for_long_rows(const TransposedWeight &, const GpuFacts &) { return false; }

// Stored rows of tensor maps are multiples of 16 bytes, and 64 rows of W^T share scales, of which
// all have 31 bits. Only the formats' own codebooks are decoded.
bool wgmma_shape_can_run(const GradProblem &problem, const GpuFacts &gpu, int config) {
  if (problem.dtype == NF4_DTYPE_FP32) return false;
  const Weight &weight = problem.weight;
  return weight.codebook == nullptr && weight.rows % kStepK == 0 && weight.blocksize() >= kStepK &&
         weight.blocks <= std::numeric_limits<int>::max() - kTileK * weight.rows &&
         wgmma_sizes_can_run(problem, gpu, config);
}

// Columns are whole K-tiles, since copies of dY do not end within one. Numbers of blocks have 31
// bits.
bool suits_multistage(const TransposedWeight &weight, const GpuFacts &) {
  return weight.cols % kMultistageTileK == 0 &&
         weight.blocks <= std::numeric_limits<int>::max() - kTileK * weight.rows;
}

bool find_costed_size(const GradProblem &problem, CostedSize &size) {
  const Weight &weight = problem.weight;
  size = {problem.lora.rank > 0 ? CostedProduct::kGradientLora : CostedProduct::kGradient,
          problem.dtype, problem.m, weight.cols, weight.rows};
  return problem.dtype != NF4_DTYPE_FP32 && weight.blocksize() >= kStepK;
}

// ---- Experts --------------------------------------------------------------------------------

int64_t gathered_bytes(const GroupedGradProblem &problem) { return gathered_bytes(problem, 0, 8); }

bool skinny_can_run_experts(const GroupedGradProblem &, const GpuFacts &, int) { return false; }

bool begins_words(const TransposedWeight &, int64_t) { return true; }

ExpertsCosts experts_costs(const TransposedWeight &) {
  static constexpr ExpertsCost kExpertsCosts[] = {
      {kMma64x64, 64, 1800, 0, 0},
      {config_named("wgmma_64x128"), 128, 1220, 0, 5500},
      {config_named("wgmma_128x128"), 128, 410, 12.75, 3500},
      {config_named("wgmma_256x128"), 128, 2740, 0, 5500},
  };
  return ExpertsCosts(kExpertsCosts);
}

}  // namespace nf4::cuda
