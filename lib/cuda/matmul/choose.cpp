#include "cuda/matmul/choose.hpp"

#include <algorithm>
#include <limits>

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/skinny/smem.hpp"
#include "cuda/matmul/wgmma/tile.hpp"
#include "cuda/matmul/workspace.hpp"

namespace nf4::cuda {
namespace {

bool skinny_can_run(const MatmulProblem &problem, const GpuFacts &gpu, int config) {
  if (!gpu.tensor_cores) return false;
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
  if (weight.blocksize() < kScaleK || !is_multiple(weight.packed, 16)) return false;
  if (!has_x_vectors(problem)) return false;
  const int64_t ctas = std::min<int64_t>(weight.rows, gpu.multiprocessors);
  const int64_t rows = ceil_divide(weight.rows, ctas) + kWarpTileN;
  // Elements of a nested block have 31 bits.
  const int log2 = weight.nested() ? weight.blocksize_log2 + weight.nested_blocksize_log2 : 0;
  if (log2 > 30) return false;
  return rows <= kSkinnyElementsMax / weight.cols &&
         skinny_tiles_that_fit(skinny_smem(max_m, gpu.tensor_maps),
                               skinny_scale_bytes(weight.cols, weight.nested(), log2),
                               gpu.shared_bytes) > 0;
}

int64_t k_tiles_of(const MatmulProblem &problem) {
  return ceil_divide(problem.weight.cols, kTileK);
}

int64_t tiles_of(const MatmulConfig &config, const MatmulProblem &problem) {
  return ceil_divide(problem.weight.rows, config.tile_n) * ceil_divide(problem.m, config.tile_m);
}

// Whether each CTA gets enough K-tiles, and room for its sums in the workspace.
bool can_stream_k(const MatmulConfig &config, const MatmulProblem &problem, const GpuFacts &gpu) {
  const int64_t tiles = tiles_of(config, problem), ctas = gpu.multiprocessors;
  const MatmulWorkspace workspace(problem);
  return tiles % ctas != 0 && tiles * k_tiles_of(problem) >= ctas * MatmulWorkspace::kMinKTiles &&
         workspace.ctas >= ctas &&
         workspace.cta_bytes >= int64_t{config.tile_n} * config.tile_m * int64_t{sizeof(float)};
}

bool wgmma_can_run(const MatmulProblem &problem, const GpuFacts &gpu, int which) {
  constexpr int64_t kMaxCols = int64_t{1} << 22;   // offsets within 256 rows have 31 bits
  constexpr int64_t kMaxRows = int64_t{1} << 30;   // of x or the weight
  constexpr int64_t kMaxPitch = int64_t{1} << 39;  // elements: a tensor map's bytes
  const Weight &weight = problem.weight;
  const MatmulConfig &config = kMatmulConfigs[which];
  // Past a row's end codes, scales and x are 0. Their product is 0 unless a caller's codebook
  // begins with an infinity or a NaN.
  const int whole = weight.codebook != nullptr ? kTileK : kStepK;
  // LutScaledBf16 is for the formats' own codebooks.
  if (weight.codebook != nullptr && problem.dtype == NF4_DTYPE_BF16 &&
      config.scale_on == ScaleOn::kWeights)
    return false;
  return gpu.wgmma && gpu.shared_bytes >= kWgmmaSmemBytes && weight.cols > 0 &&
         weight.cols % whole == 0 && weight.cols <= kMaxCols && weight.rows <= kMaxRows &&
         problem.m <= kMaxRows && weight.blocksize() >= kStepK && is_multiple(weight.packed, 16) &&
         has_x_vectors(problem) && (problem.m == 1 || problem.x_stride < kMaxPitch) &&
         ceil_divide(weight.rows, 128) * ceil_divide(problem.m, 16) <=
             std::numeric_limits<int>::max() / 2 &&
         (!is_stream_k(which) || can_stream_k(config, problem, gpu));
}

// Each CTA makes whole tiles; where tiles are few, clusters do.
void plan_persistent(const MatmulProblem &problem, const GpuFacts &gpu, const CostModel &model,
                     int config, WgmmaPlan &plan) {
  const MatmulConfig &tile = kMatmulConfigs[config];
  const int64_t tiles = plan.tiles(), k_tiles = k_tiles_of(problem);
  plan.clusters = std::clamp(tiles, int64_t{1}, int64_t{gpu.multiprocessors});
  plan.cycles =
      model.start + static_cast<double>(ceil_divide(tiles, plan.clusters)) *
                        (model.tile + static_cast<double>(k_tiles) * model.k_tile[config]);
  for (int size = 2; size <= kMaxClusterSize; ++size) {
    if (k_tiles < size * MatmulWorkspace::kMinKTiles || tiles > gpu.resident_clusters[size])
      continue;
    // A CTA sends all of its sums but a share, and there are more to wait for.
    const double sent = static_cast<double>(tile.tile_m) * tile.tile_n * (1 - 1.0 / size);
    const double cycles = model.start + model.tile +
                          static_cast<double>(ceil_divide(k_tiles, size)) * model.k_tile[config] +
                          model.cluster_exchange + model.cluster_cta * size +
                          model.cluster_sum * sent;
    if (cycles >= plan.cycles) continue;
    plan.clusters = tiles;
    plan.cluster_size = size;
    plan.cycles = cycles;
  }
}

// All CTAs share the tiles of the last wave, and of the one before it if there is one: then partial
// sums are stored long before they are reduced.
void plan_stream_k(const MatmulProblem &problem, const GpuFacts &gpu, const CostModel &model,
                   int config, WgmmaPlan &plan) {
  const MatmulConfig &tile = kMatmulConfigs[config];
  const int64_t tiles = plan.tiles(), k_tiles = k_tiles_of(problem);
  plan.clusters = gpu.multiprocessors;
  plan.stream_k_tiles = std::min(tiles, plan.clusters + tiles % plan.clusters);
  const auto share = static_cast<double>(ceil_divide(plan.stream_k_tiles * k_tiles, plan.clusters));
  const auto whole = static_cast<double>((tiles - plan.stream_k_tiles) / plan.clusters);
  // A CTA stores its sums once, and reduces others' once, or for each CTA that has a part.
  const auto peers = static_cast<double>(ceil_divide(plan.clusters, plan.stream_k_tiles) - 1);
  const double sums = static_cast<double>(tile.tile_m) * tile.tile_n;
  plan.cycles = model.start + model.stream_k_exchange +
                (model.stream_k_sum + model.stream_k_peer * peers) * sums +
                (whole + 2) * model.tile +
                (whole * static_cast<double>(k_tiles) + share) * model.k_tile[config];
}

double skinny16_cycles(const Weight &weight, const GpuFacts &gpu, const CostModel &model) {
  const int64_t rows = ceil_divide(weight.rows, gpu.multiprocessors);
  return model.skinny16_start + model.skinny16_element * static_cast<double>(rows * weight.cols);
}

}  // namespace

bool can_run(const MatmulProblem &problem, const GpuFacts &gpu, int config) {
  if (is_wgmma(config)) return wgmma_can_run(problem, gpu, config);
  return config == kMma64x64 || skinny_can_run(problem, gpu, config);
}

WgmmaPlan plan_wgmma(const MatmulProblem &problem, const GpuFacts &gpu, const CostModel &model,
                     int config) {
  WgmmaPlan plan{};
  plan.n_tiles = ceil_divide(problem.weight.rows, kMatmulConfigs[config].tile_n);
  plan.m_tiles = ceil_divide(problem.m, kMatmulConfigs[config].tile_m);
  plan.cluster_size = 1;
  if (is_stream_k(config))
    plan_stream_k(problem, gpu, model, config, plan);
  else
    plan_persistent(problem, gpu, model, config, plan);
  return plan;
}

int choose_skinny(const MatmulProblem &problem, const GpuFacts &gpu, const CostModel &model) {
  const bool many = problem.weight.rows >= model.skinny2_rows_per_cta * gpu.multiprocessors;
  for (const int config : {kSkinny2, kSkinny8, kSkinny16})
    if ((config != kSkinny2 || many) && skinny_can_run(problem, gpu, config)) return config;
  // Its partial sums are the smallest, where rows are very long.
  return skinny_can_run(problem, gpu, kSkinny2) ? kSkinny2 : kMma64x64;
}

void choose_wgmma(const MatmulProblem &problem, const GpuFacts &gpu, const CostModel &model,
                  MatmulChoice &choice) {
  double least = std::numeric_limits<double>::infinity();
  if (choice.config == kSkinny16)
    least = model.skinny16_margin * skinny16_cycles(problem.weight, gpu, model);
  for (int config = kFirstWgmma; config < kMatmulConfigCount; ++config) {
    if (!wgmma_can_run(problem, gpu, config)) continue;
    const WgmmaPlan plan = plan_wgmma(problem, gpu, model, config);
    if (plan.cycles >= least) continue;
    least = plan.cycles;
    choice = {config, plan};
  }
}

}  // namespace nf4::cuda
