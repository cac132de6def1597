// Weights with a codebook: sizes, what their kernels can run, and the costs of skinny_16 and of
// experts' kernels. matmul/cost_model.hpp has the costs of the wgmma kernels. Calls no CUDA.
#include <algorithm>

#include "cuda/costs/costs.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/choose.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/matmul/skinny/smem.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul_grouped/choose.hpp"

namespace nf4::cuda {

// ---- One weight -----------------------------------------------------------------------------

// Kernels of MXFP4 and NVFP4 multiply any number of whole blocks at once.
MatmulSize size_of(const MatmulProblem &problem) {
  const Weight &weight = problem.weight;
  return {problem.dtype,
          problem.m,
          weight.rows,
          weight.cols,
          weight.has_scale_bytes() ? kStepK : weight.blocksize(),
          kind_of(weight)};
}

// The scale bytes of a row and K-tile are loaded at once.
bool suits_multistage(const Weight &weight, const GpuFacts &) {
  return !weight.has_scale_bytes() ||
         is_multiple(weight.absmax, kMultistageTileK >> weight.blocksize_log2);
}

bool skinny_can_run(const MatmulProblem &problem, const GpuFacts &gpu, int config) {
  // Turing's kernels take no adapter.
  if (!has_mma(gpu, problem.dtype) || (!gpu.tensor_cores && problem.lora.rank > 0)) return false;
  const Weight &weight = problem.weight;
  const int max_m = kMatmulConfigs[config].tile_m;
  // Past a row's end codes and x are 0. Their product is 0 unless a caller's codebook begins with
  // an infinity or a NaN.
  if (weight.codebook != nullptr && weight.cols % kWarpTileK != 0) return false;
  // kScaleK columns share a scale, and a CTA's rows have few enough elements, all of which have 32
  // bits.
  if (problem.m > max_m || weight.cols == 0 || weight.cols % kScaleK != 0) return false;
  if (weight.cols > kSkinnyElementsMax / kWarpTileN || weight.rows > UINT32_MAX / weight.cols)
    return false;
  // The scale bytes of kScaleK columns are loaded at once, and multiply no fp32.
  if (weight.has_scale_bytes() ? problem.dtype == NF4_DTYPE_FP32 ||
                                     !is_multiple(weight.absmax, kScaleK >> weight.blocksize_log2)
                               : weight.blocksize() < kScaleK)
    return false;
  if (!is_multiple(weight.packed, 16)) return false;
  if (!has_x_vectors(problem)) return false;
  const int64_t ctas =
      std::min(weight.rows, weight_ctas(gpu.multiprocessors, lora_ctas(problem.lora, weight.cols)));
  const int64_t rows = ceil_divide(weight.rows, ctas) + kWarpTileN;
  // Elements of a nested block have 31 bits.
  const int log2 = weight.nested() ? weight.blocksize_log2 + weight.nested_blocksize_log2 : 0;
  if (log2 > 30) return false;
  return rows <= kSkinnyElementsMax / weight.cols &&
         skinny_tiles_that_fit(
             skinny_smem(skinny_layout(problem.dtype, max_m, gpu), max_m, gpu.tensor_maps),
             skinny_scale_bytes(weight),
             gpu.shared_bytes -
                 shared_lora_bytes(problem.m, static_cast<int>(lora_stride(problem.lora)))) > 0;
}

// CTAs share the rows evenly, in whole warp tiles.
double skinny16_cycles(const Weight &weight, const GpuFacts &gpu, const CostModel &model) {
  const int64_t rows =
      ceil_divide(ceil_divide(weight.rows, gpu.multiprocessors), kWarpTileN) * kWarpTileN;
  return model.skinny16_start + model.skinny16_element * static_cast<double>(rows * weight.cols);
}

bool takes_skinny2_for_long_rows(const Weight &, const GpuFacts &) { return false; }

bool wgmma_shape_can_run(const MatmulProblem &problem, const GpuFacts &gpu, int config) {
  if (problem.dtype == NF4_DTYPE_FP32) return false;
  const Weight &weight = problem.weight;
  // Past a row's end codes, scales and x are 0. Their product is 0 unless a caller's codebook
  // begins with an infinity or a NaN.
  const int whole = weight.codebook != nullptr ? kTileK : kStepK;
  // LutScaledBf16 and LutScaledFp16 are for the formats' own codebooks.
  if (weight.codebook != nullptr && kMatmulConfigs[config].scale_on == ScaleOn::kWeights)
    return false;
  // The scale bytes of a step are loaded at once.
  if (weight.has_scale_bytes() ? !is_multiple(weight.absmax, kStepK >> weight.blocksize_log2)
                               : weight.blocksize() < kStepK)
    return false;
  return weight.cols % whole == 0 && wgmma_sizes_can_run(problem, gpu, config);
}

// Smaller blocks have no multistage kernels.
bool find_costed_size(const MatmulProblem &problem, CostedSize &size) {
  const Weight &weight = problem.weight;
  size = {problem.lora.rank > 0 ? CostedProduct::kCodebookLora : CostedProduct::kCodebook,
          problem.dtype, problem.m, weight.rows, weight.cols};
  return problem.dtype != NF4_DTYPE_FP32 && weight.blocksize() >= kStepK;
}

// ---- Experts --------------------------------------------------------------------------------

int64_t gathered_bytes(const GroupedProblem &problem) { return gathered_bytes(problem, 4, 64); }

bool skinny_can_run_experts(const GroupedProblem &problem, const GpuFacts &gpu, int config) {
  return problem.weight.rows <= kMaxMapRows &&
         skinny_can_run(two_rows(problem, expert_weight(problem)), gpu, config);
}
bool begins_words(const Weight &, int64_t) { return true; }

ExpertsCosts experts_costs(const Weight &) {
  static constexpr ExpertsCost kExpertsCosts[] = {
      {kMma64x64, 64, 1800, 0, 0},
      {kSkinny2, kWarpTileK, 165, 0, 0},
      {kSkinny8, kWarpTileK, 195, 0, 0},
      {kSkinny16, kWarpTileK, 280, 0, 0},
      {config_named("wgmma_32x256"), 128, 1450, 0, 5500},
      {config_named("wgmma_64x256"), 128, 760, 22, 5500},
      {config_named("wgmma_96x256"), 128, 1240, 9, 10500},
      {config_named("wgmma_152x128"), 128, 60, 11.9, 4500},
      {config_named("wgmma_208x128"), 128, 2150, 0, 7500},
      {config_named("wgmma_304x128"), 128, 2570, 0, 12000},
      {config_named("multistage_16x256"), 64, 1300, 0, 3000},
      {config_named("multistage_32x256"), 64, 1530, 0, 3000},
      {config_named("multistage_64x256"), 64, 2200, 0, 4000},
      {config_named("multistage_128x256"), 64, 2550, 0, 6000},
  };
  return ExpertsCosts(kExpertsCosts);
}

}  // namespace nf4::cuda
