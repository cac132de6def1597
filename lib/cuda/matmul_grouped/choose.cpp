#include "cuda/matmul_grouped/choose.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "cuda/backend.hpp"
#include "cuda/matmul/skinny/smem.hpp"
#include "cuda/matmul_grouped/wgmma_configs.hpp"

namespace nf4::cuda {
namespace {

constexpr int64_t kMaxRows = int64_t{1} << 30;  // of a tensor map

// What a CTA tile takes, measured on an H200 (docs/design/matmul-grouped.md): cycles of its
// multiprocessor for so many columns, and beside them.
struct Cost {
  int config;
  int columns;
  double cycles;
  double tile_cycles;
};
constexpr Cost kCosts[] = {
    {kMma64x64, 64, 1800, 0},
    {kSkinny2, kWarpTileK, 165, 0},
    {kSkinny8, kWarpTileK, 195, 0},
    {kSkinny16, kWarpTileK, 280, 0},
    {config_named("wgmma_32x256"), 128, 1420, 5500},
    {config_named("wgmma_64x256"), 128, 2150, 5500},
    {config_named("wgmma_152x128"), 128, 2000, 5000},
    {config_named("wgmma_208x128"), 128, 2500, 6000},
    {config_named("wgmma_304x128"), 128, 3150, 8500},
};

// How many chunks of up to `rows` rows an expert has, on average: rows that come at random are
// about normally distributed around their mean, with a variance as large as it.
double mean_chunks(const GroupedProblem &problem, int rows) {
  constexpr double kOctiles[] = {0.157, 0.489, 0.887, 1.534};  // the middles of eight equal parts
  const double mean = static_cast<double>(problem.m) / problem.experts;
  double chunks = 0;
  for (const double octile : kOctiles)
    for (const double sign : {-1.0, 1.0})
      chunks += std::ceil(std::max(0.0, mean + sign * octile * std::sqrt(mean)) / rows);
  return std::min(chunks / 8, static_cast<double>(max_chunks(problem, rows)) / problem.experts);
}

// A launch, and x read and written.
double gather_cycles(const GroupedProblem &problem, const GpuFacts &gpu) {
  constexpr double kLaunchCycles = 4000, kBytesPerCycle = 8;  // of a multiprocessor
  return kLaunchCycles + static_cast<double>(problem.m * problem.weight.cols * 4) /
                             (kBytesPerCycle * gpu.multiprocessors);
}

double estimated_cycles(const GroupedProblem &problem, const GpuFacts &gpu, const Cost &cost) {
  const double tiles = mean_chunks(problem, kMatmulConfigs[cost.config].tile_m) * problem.experts *
                       static_cast<double>(expert_n_tiles(problem, cost.config));
  const double tile_cycles =
      static_cast<double>(ceil_divide(problem.weight.cols, cost.columns)) * cost.cycles +
      cost.tile_cycles;
  // Skinny CTAs share tiles; of others the last wave is half full, on average.
  const double waves = tiles / gpu.multiprocessors;
  if (!is_wgmma(cost.config)) return waves * tile_cycles;
  return std::max(1.0, waves + 0.5) * tile_cycles +
         (problem.x_index == nullptr ? 0 : gather_cycles(problem, gpu));
}

bool skinny_can_run_experts(const GroupedProblem &problem, const GpuFacts &gpu, int config) {
  MatmulProblem expert = stack_problem(problem);
  expert.weight.rows = problem.expert_rows();
  return problem.weight.rows <= kMaxRows && skinny_can_run(expert, gpu, config);
}

bool wgmma_can_run_experts(const GroupedProblem &problem, const GpuFacts &gpu, int config) {
  const bool has_x = problem.x_index != nullptr ? matmul_grouped_workspace_bytes(problem) > 0
                                                : problem.x_rows > 0 && problem.x_rows <= kMaxRows;
  return grouped_wgmma_index(config) >= 0 && has_x && problem.m <= kMaxRows &&
         wgmma_can_run(stack_problem(problem), gpu, config);
}

}  // namespace

MatmulProblem stack_problem(const GroupedProblem &problem) {
  MatmulProblem stack{};
  stack.weight = problem.weight;
  stack.dtype = problem.dtype;
  stack.m = 2;  // a stride counts
  stack.x = problem.x;
  stack.x_stride = problem.x_stride;
  stack.y = problem.y;
  stack.y_stride = problem.y_stride;
  return stack;
}

int64_t max_chunks(const GroupedProblem &problem, int rows) {
  return std::min(problem.m, problem.experts + problem.m / rows);
}

int64_t expert_n_tiles(const GroupedProblem &problem, int config) {
  return ceil_divide(problem.expert_rows(), kMatmulConfigs[config].tile_n);
}

bool grouped_can_run(const GroupedProblem &problem, const GpuFacts &gpu, int config) {
  if (config == kMma64x64) return true;
  // Numbers of tiles have 31 bits.
  if (max_chunks(problem, kMatmulConfigs[config].tile_m) >
      std::numeric_limits<int>::max() / 2 / expert_n_tiles(problem, config))
    return false;
  return is_skinny(config) ? skinny_can_run_experts(problem, gpu, config)
                           : wgmma_can_run_experts(problem, gpu, config);
}

int choose_grouped(const GroupedProblem &problem, const GpuFacts &gpu) {
  int best = kMma64x64;
  double least = std::numeric_limits<double>::infinity();
  for (const Cost &cost : kCosts) {
    if (!grouped_can_run(problem, gpu, cost.config)) continue;
    const double cycles = estimated_cycles(problem, gpu, cost);
    if (cycles >= least) continue;
    best = cost.config;
    least = cycles;
  }
  return best;
}

}  // namespace nf4::cuda
