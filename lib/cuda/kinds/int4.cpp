// Integer weights: sizes, what their kernels can run, and the costs of skinny_16 and of experts'
// kernels. matmul/cost_model.hpp has the costs of the wgmma kernels. Calls no CUDA.
#include "core/int4.hpp"

#include <algorithm>

#include "cuda/costs/costs.hpp"
#include "cuda/dequant/int4_choose.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/choose.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/matmul/skinny/smem.hpp"
#include "cuda/matmul/skinny/strip_plan.hpp"
#include "cuda/matmul/skinny/strip_smem.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul_grouped/choose.hpp"

namespace nf4::cuda {
namespace {

// Words of zero points and vectors of scales have 8 rows; rows of tensor maps and of compressed-
// tensors' scales are multiples of 16 bytes.
bool int4_skinny_sizes_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config) {
  constexpr int64_t kMaxRows = int64_t{1} << 28;  // 32-bit coordinates in tensor maps
  const Int4Weight &weight = problem.weight;
  if (!gpu.tensor_cores || problem.m > kMatmulConfigs[config].tile_m || weight.g_idx != nullptr)
    return false;
  if (weight.cols == 0 || weight.group_size % kScaleK != 0) return false;
  if (weight.cols > kSkinnyElementsMax / kWarpTileN || weight.rows > kMaxRows) return false;
  return is_multiple(weight.packed, 16) && is_multiple(weight.scales, 16) &&
         has_x_vectors(problem) && (weight.layout != NF4_INT4_GPTQ || weight.rows % kInt4Unit == 0);
}

}  // namespace

// ---- One weight -----------------------------------------------------------------------------

MatmulSize size_of(const Int4MatmulProblem &problem) {
  const Int4Weight &weight = problem.weight;
  return {problem.dtype,
          problem.m,
          weight.rows,
          weight.cols,
          weight.g_idx == nullptr ? weight.group_size : 1,
          kind_of(weight)};
}

bool skinny_tiles_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config) {
  const Int4Weight &weight = problem.weight;
  if (!int4_skinny_sizes_can_run(problem, gpu, config)) return false;
  const int64_t ctas = std::min<int64_t>(ceil_divide(weight.rows, kInt4Unit), gpu.multiprocessors);
  const int64_t rows = ceil_divide(weight.rows, ctas) + kInt4Unit + kWarpTileN;
  return rows <= kSkinnyElementsMax / weight.cols &&
         int4_skinny_tiles_that_fit(int4_skinny_smem(kMatmulConfigs[config].tile_m), weight.groups,
                                    gpu.shared_bytes) > 0;
}

bool skinny_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config) {
  constexpr int64_t kMaxPitch = int64_t{1} << 39;  // elements: a tensor map's bytes
  const Int4Weight &weight = problem.weight;
  const int max_m = kMatmulConfigs[config].tile_m;
  if (!takes_strips(weight.layout, max_m, gpu.tensor_maps))
    return skinny_tiles_can_run(problem, gpu, config);
  return int4_skinny_sizes_can_run(problem, gpu, config) && gpu.tensor_maps && config != kSkinny2 &&
         (weight.layout == NF4_INT4_GPTQ || weight.rows % 32 == 0) &&
         (problem.m == 1 || problem.x_stride < kMaxPitch) &&
         gpu.shared_bytes >= strip_smem(narrow_strip(weight.layout), max_m).bytes &&
         gpu.shared_bytes >= strip_smem(wide_strip(weight.layout), max_m).bytes;
}

// Rows of the weight's tensor map are multiples of 16 bytes; scales and zeros are loaded for
// several rows at once.
bool wgmma_shape_can_run(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config) {
  const Int4Weight &weight = problem.weight;
  const bool by_rows = weight.layout == NF4_INT4_COMPRESSED_TENSORS;
  const int whole_rows = by_rows ? 1 : weight.layout == NF4_INT4_AWQ ? 32 : 8;
  return weight.cols % kStepK == 0 && weight.rows % whole_rows == 0 && weight.g_idx == nullptr &&
         weight.group_size % kStepK == 0 && (by_rows || is_multiple(weight.scales, 8)) &&
         wgmma_sizes_can_run(problem, gpu, config);
}

// Copies of 16 bytes have four rows of GPTQ's words and 32 of AWQ's. A K-tile lies in one group.
// Turing has no kernels of AWQ.
bool suits_multistage(const Int4Weight &weight, const GpuFacts &gpu) {
  if (weight.layout == NF4_INT4_AWQ && !gpu.tensor_cores) return false;
  const int whole_rows = weight.layout == NF4_INT4_GPTQ  ? 4
                         : weight.layout == NF4_INT4_AWQ ? 32
                                                         : 1;
  return weight.g_idx == nullptr && weight.group_size % kMultistageTileK == 0 &&
         weight.rows % whole_rows == 0;
}

// For 9 to 16 rows of x the skinny kernels without TMA take longer, unless weights are small. With
// fewer rows there is no workspace, so that CTAs share no tiles of the multistage kernels. There
// mma_64x64 has clusters that share K, on GPUs that have clusters, and is expected to take less
// time where tiles are few for the GPU.
bool multistage_is_faster(const Int4MatmulProblem &problem, const GpuFacts &gpu, int config) {
  constexpr int64_t kLargeWeight = int64_t{1} << 24, kMultiprocessorsPerTile = 5;
  const bool shares = MatmulWorkspace(problem).ctas != 0;
  if (config == kSkinny16)
    return shares && !gpu.tensor_maps && problem.weight.elements >= kLargeWeight;
  return config == kMma64x64 &&
         (shares || !gpu.tensor_maps ||
          ceil_divide(problem.weight.rows, kMultistageTileN) * kMultiprocessorsPerTile >=
              gpu.multiprocessors);
}

// The figures were fitted without whole warp tiles.
double skinny16_cycles(const Int4Weight &weight, const GpuFacts &gpu, const CostModel &model) {
  if (!takes_strips(weight.layout, 16, gpu.tensor_maps)) {
    const int64_t rows = ceil_divide(weight.rows, gpu.multiprocessors);
    return model.skinny16_start + model.skinny16_element * static_cast<double>(rows * weight.cols);
  }
  const StripPlan plan = plan_strips(weight.layout, weight.rows, weight.cols, gpu);
  return model.strip16_start +
         model.strip16_element * plan.busiest_rows(gpu) * static_cast<double>(weight.cols);
}

// skinny_2 loads x ahead where rows are long.
bool takes_skinny2_for_long_rows(const Int4Weight &weight, const GpuFacts &gpu) {
  return weight.cols > kSkinnyWarps * kWarpTileK &&
         !takes_strips(weight.layout, kMatmulConfigs[kSkinny8].tile_m, gpu.tensor_maps);
}

bool find_costed_size(const Int4MatmulProblem &problem, CostedSize &size) {
  const Int4Weight &weight = problem.weight;
  const CostedProduct product = weight.layout == NF4_INT4_GPTQ  ? CostedProduct::kGptq
                                : weight.layout == NF4_INT4_AWQ ? CostedProduct::kAwq
                                                                : CostedProduct::kCompressedTensors;
  size = {product, problem.dtype, problem.m, weight.rows, weight.cols};
  return problem.dtype != NF4_DTYPE_FP32 && can_align(weight);
}

// ---- Experts --------------------------------------------------------------------------------

int64_t gathered_bytes(const Int4GroupedProblem &problem) { return gathered_bytes(problem, 0, 64); }

// There is a row of x, which is read where rows do not exist. Each expert begins with a word of
// zero points and a vector of scales.
bool skinny_can_run_experts(const Int4GroupedProblem &problem, const GpuFacts &gpu, int config) {
  const Int4Weight stack = stack_weight(problem);
  return problem.weight.layout != NF4_INT4_AWQ && gpu.tensor_maps && problem.x_rows > 0 &&
         problem.weight.rows % kInt4Unit == 0 && stack.rows <= kMaxMapRows &&
         stack.cols <= kMaxMapRows &&
         skinny_tiles_can_run(two_rows(problem, problem.weight), gpu, config);
}

// The words of zero points of each expert begin with its rows.
bool begins_words(const Int4Weight &weight, int64_t expert_rows) {
  return stacked_along_k(weight) || weight.zeros == nullptr || expert_rows % kInt4PerWord == 0;
}

ExpertsCosts experts_costs(const Int4Weight &) {
  // mma and skinny have the figures of codebooks.
  static constexpr ExpertsCost kExpertsCosts[] = {
      {kMma64x64, 64, 1800, 0, 0},
      {kSkinny2, kWarpTileK, 165, 0, 0},
      {kSkinny8, kWarpTileK, 195, 0, 0},
      {kSkinny16, kWarpTileK, 280, 0, 0},
      {config_named("wgmma_32x256"), 128, 1540, 0, 5500},
      {config_named("wgmma_64x128"), 128, 990, 0, 5000},
      {config_named("wgmma_128x128"), 128, 940, 4.7, 5000},
  };
  return ExpertsCosts(kExpertsCosts);
}

}  // namespace nf4::cuda
