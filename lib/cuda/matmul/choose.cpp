#include "cuda/matmul/choose.hpp"

#include <algorithm>
#include <limits>

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/matmul/wgmma/tile.hpp"

namespace nf4::cuda {
namespace {

int64_t k_tiles_of(const MatmulSize &size) { return ceil_divide(size.cols, kTileK); }

int64_t tiles_of(const MatmulConfig &config, const MatmulSize &size) {
  return ceil_divide(size.rows, config.tile_n) * ceil_divide(size.m, config.tile_m);
}

// Each CTA makes whole tiles; where tiles are few, clusters do.
void plan_persistent(const MatmulSize &size, const GpuFacts &gpu, const CostModel &model,
                     int config, WgmmaPlan &plan) {
  const MatmulConfig &tile = kMatmulConfigs[config];
  const int64_t tiles = plan.tiles(), k_tiles = k_tiles_of(size);
  plan.clusters = std::clamp(tiles, int64_t{1}, int64_t{gpu.multiprocessors});
  plan.cycles =
      model.start + static_cast<double>(ceil_divide(tiles, plan.clusters)) *
                        (model.tile + static_cast<double>(k_tiles) * model.k_tile[config]);
  for (int ctas = 2; ctas <= kMaxClusterSize; ++ctas) {
    if (k_tiles < ctas * MatmulWorkspace::kMinKTiles || tiles > gpu.resident_clusters[ctas])
      continue;
    // A CTA sends all of its sums but a share, and there are more to wait for.
    const double sent = static_cast<double>(tile.tile_m) * tile.tile_n * (1 - 1.0 / ctas);
    const double cycles = model.start + model.tile +
                          static_cast<double>(ceil_divide(k_tiles, ctas)) * model.k_tile[config] +
                          model.cluster_exchange + model.cluster_cta * ctas +
                          model.cluster_sum * sent;
    if (cycles >= plan.cycles) continue;
    plan.clusters = tiles;
    plan.cluster_size = ctas;
    plan.cycles = cycles;
  }
}

bool can_share_waves(const MatmulSize &size, const GpuFacts &gpu, int config) {
  const int64_t tiles = tiles_of(kMatmulConfigs[config], size), ctas = gpu.multiprocessors;
  return ctas <= MatmulWorkspace::kMaxCtas && tiles % ctas != 0 &&
         tiles * k_tiles_of(size) >= ctas * MatmulWorkspace::kMinKTiles;
}
bool can_split_k(const MatmulSize &size, const GpuFacts &gpu, int config, int ctas) {
  const int64_t tiles = tiles_of(kMatmulConfigs[config], size);
  return size.kind != WeightKind::kTransposed && has_split_k(config) && tiles > 0 &&
         tiles <= std::min(int64_t{gpu.multiprocessors}, MatmulWorkspace::kMaxCtas) / ctas &&
         k_tiles_of(size) >= ctas * MatmulWorkspace::kMinKTiles;
}

// All CTAs share the tiles of the last wave, and of the one before it if there is one: then partial
// sums are stored long before they are reduced.
void plan_shared_waves(const MatmulSize &size, const CostModel &model, int config, int64_t ctas,
                       WgmmaPlan &plan) {
  const MatmulConfig &tile = kMatmulConfigs[config];
  const int64_t tiles = plan.tiles(), k_tiles = k_tiles_of(size);
  plan.clusters = ctas;
  plan.stream_k_tiles = std::min(tiles, plan.clusters + tiles % plan.clusters);
  const auto share = static_cast<double>(ceil_divide(plan.stream_k_tiles * k_tiles, plan.clusters));
  const auto whole = static_cast<double>((tiles - plan.stream_k_tiles) / plan.clusters);
  // A CTA stores its sums once, and reduces others' once, or for each CTA that has a part.
  const auto peers = static_cast<double>(ceil_divide(plan.clusters, plan.stream_k_tiles) - 1);
  const double sums = static_cast<double>(tile.tile_m) * tile.tile_n;
  plan.cycles =
      model.start + model.stream_k_exchange + (tile.tile_m <= 128 ? model.stream_k_narrow : 0) +
      (model.stream_k_sum + model.stream_k_peer * peers) * sums + (whole + 2) * model.tile +
      (whole * static_cast<double>(k_tiles) + share) * model.k_tile[config];
}

// The same number of CTAs share each tile.
void plan_split_k(const MatmulSize &size, const CostModel &model, int config, int ctas,
                  WgmmaPlan &plan) {
  const MatmulConfig &tile = kMatmulConfigs[config];
  const auto k_tiles = static_cast<double>(ceil_divide(k_tiles_of(size), ctas));
  const auto sums = static_cast<double>(std::min<int64_t>(size.m, tile.tile_m) * tile.tile_n);
  const double cycles = model.start + model.tile + k_tiles * model.k_tile[config] +
                        model.split_k_exchange + model.split_k_sum * sums;
  if (cycles >= plan.cycles) return;
  plan.stream_k_tiles = 0;
  plan.clusters = plan.tiles();
  plan.cluster_size = ctas;
  plan.cycles = cycles;
}

void plan_stream_k(const MatmulSize &size, const GpuFacts &gpu, const CostModel &model, int config,
                   WgmmaPlan &plan) {
  plan.cycles = std::numeric_limits<double>::infinity();
  if (can_share_waves(size, gpu, config)) {
    const int64_t ctas = gpu.multiprocessors;
    plan_shared_waves(size, model, config, ctas, plan);
    // Without split-K: the same number of CTAs for each tile, of which fewer have a part then.
    const int64_t of_tile = ctas / plan.tiles();
    if (size.kind == WeightKind::kTransposed && of_tile > 1 && k_tiles_of(size) % of_tile == 0) {
      WgmmaPlan even = plan;
      plan_shared_waves(size, model, config, of_tile * plan.tiles(), even);
      if (even.cycles < plan.cycles) plan = even;
    }
  }
  for (int ctas = 2; ctas <= kMaxClusterSize; ++ctas)
    if (can_split_k(size, gpu, config, ctas)) plan_split_k(size, model, config, ctas, plan);
}

}  // namespace

bool can_stream_k(const MatmulSize &size, const GpuFacts &gpu, int config) {
  return workspace_holds(size, config) &&
         (can_share_waves(size, gpu, config) || can_split_k(size, gpu, config, 2));
}

WgmmaPlan plan_wgmma(const MatmulSize &size, const GpuFacts &gpu, const CostModel &model,
                     int config) {
  WgmmaPlan plan{};
  plan.n_tiles = ceil_divide(size.rows, kMatmulConfigs[config].tile_n);
  plan.m_tiles = ceil_divide(size.m, kMatmulConfigs[config].tile_m);
  plan.cluster_size = 1;
  if (is_stream_k(config))
    plan_stream_k(size, gpu, model, config, plan);
  else
    plan_persistent(size, gpu, model, config, plan);
  return plan;
}

bool multistage_sizes_can_run(const MatmulSize &size, const GpuFacts &gpu, int config) {
  constexpr int64_t kMaxCols = int64_t{1} << 22;
  constexpr int64_t kMaxRows = int64_t{1} << 30;  // x's or the weight's
  const MatmulConfig &tile = kMatmulConfigs[config];
  return has_kernel(size.kind, config) && has_mma(gpu, size.dtype) &&
         size.dtype != NF4_DTYPE_FP32 &&
         has_multistage_tile(size.kind, tile.tile_m, gpu.tensor_cores) &&
         gpu.shared_bytes >= multistage_smem_bytes(size.kind, tile.tile_m, gpu.tensor_cores) &&
         size.rows > 0 && size.m > 0 && size.cols > 0 && size.cols % kMultistageTileK == 0 &&
         size.cols <= kMaxCols && size.scale_columns >= kMultistageTileK && size.rows <= kMaxRows &&
         size.m <= kMaxRows &&
         ceil_divide(size.rows, tile.tile_n) * ceil_divide(size.m, tile.tile_m) <=
             std::numeric_limits<int>::max() / 2;
}

template <class W>
bool wgmma_sizes_can_run(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, int config) {
  constexpr int64_t kMaxCols = int64_t{1} << 22;   // offsets within 256 rows have 31 bits
  constexpr int64_t kMaxRows = int64_t{1} << 30;   // x's or the weight's
  constexpr int64_t kMaxPitch = int64_t{1} << 39;  // elements: a tensor map's bytes
  const W &weight = problem.weight;
  return gpu.wgmma && gpu.shared_bytes >= kWgmmaSmemBytes && weight.cols > 0 &&
         weight.cols <= kMaxCols && weight.rows <= kMaxRows && problem.m <= kMaxRows &&
         is_multiple(weight.packed, 16) && has_x_vectors(problem) &&
         (problem.m == 1 || problem.x_stride < kMaxPitch) &&
         ceil_divide(weight.rows, 128) * ceil_divide(problem.m, 16) <=
             std::numeric_limits<int>::max() / 2 &&
         (!is_stream_k(config) || can_stream_k(size_of(problem), gpu, config));
}

void leave_multiprocessors(int count, GpuFacts &gpu) {
  gpu.multiprocessors -= count;
  for (int size = 2; size <= kMaxClusterSize; ++size)
    gpu.resident_clusters[size] -= static_cast<int>(ceil_divide(count, size));
}

template <class W>
int choose_skinny(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, const CostModel &model) {
  const bool many = problem.dtype == NF4_DTYPE_FP32 ||
                    problem.weight.rows >= model.skinny2_rows_per_cta * gpu.multiprocessors ||
                    takes_skinny2_for_long_rows(problem.weight, gpu);
  for (const int config : {kSkinny2, kSkinny8, kSkinny16})
    if ((config != kSkinny2 || many) && skinny_can_run(problem, gpu, config)) return config;
  // Its partial sums are the smallest, where rows are very long.
  return skinny_can_run(problem, gpu, kSkinny2) ? kSkinny2 : kMma64x64;
}

template <class W>
void choose_wgmma(const MatmulProblemOf<W> &problem, const GpuFacts &gpu, const CostModel &model,
                  std::optional<int> forced, MatmulChoice &choice) {
  double least = std::numeric_limits<double>::infinity();
  if (choice.config == kSkinny16)
    least = model.skinny16_margin * skinny16_cycles(problem.weight, gpu, model);
  for (int config = kFirstWgmma; config < kFirstMultistage; ++config) {
    if (config != forced.value_or(config) || !wgmma_can_run(problem, gpu, config)) continue;
    const WgmmaPlan plan = plan_wgmma(size_of(problem), gpu, model, config);
    if (plan.cycles >= least) continue;
    least = plan.cycles;
    choice = {config, plan};
  }
}

template bool wgmma_sizes_can_run(const MatmulProblem &, const GpuFacts &, int);
template bool wgmma_sizes_can_run(const Int4MatmulProblem &, const GpuFacts &, int);
template bool wgmma_sizes_can_run(const GradProblem &, const GpuFacts &, int);
template int choose_skinny(const MatmulProblem &, const GpuFacts &, const CostModel &);
template int choose_skinny(const GradProblem &, const GpuFacts &, const CostModel &);
template int choose_skinny(const Int4MatmulProblem &, const GpuFacts &, const CostModel &);
template void choose_wgmma(const MatmulProblem &, const GpuFacts &, const CostModel &,
                           std::optional<int>, MatmulChoice &);
template void choose_wgmma(const Int4MatmulProblem &, const GpuFacts &, const CostModel &,
                           std::optional<int>, MatmulChoice &);
template void choose_wgmma(const GradProblem &, const GpuFacts &, const CostModel &,
                           std::optional<int>, MatmulChoice &);

}  // namespace nf4::cuda
