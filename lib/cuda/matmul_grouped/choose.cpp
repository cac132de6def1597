#include "cuda/matmul_grouped/choose.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/matmul/wgmma/tile.hpp"

namespace nf4::cuda {
namespace {

// Returns the cycles of a tile with so many rows of x.
double tile_cycles(const ExpertsCost &cost, int64_t columns, int rows) {
  const MatmulConfig &config = kMatmulConfigs[cost.config];
  int multiplied = config.tile_m;
  for (const int fewer : fewer_rows(config).of)
    if (fewer >= rows) multiplied = std::min(multiplied, fewer);
  return static_cast<double>(ceil_divide(columns, cost.columns)) *
             (cost.cycles + cost.row_cycles * multiplied) +
         cost.tile_cycles;
}

// Chunks of rows of x that an expert has on average, and the cycles of a tile of each.
struct Chunks {
  double count = 0;
  double cycles = 0;
};
// Rows that come at random are about normally distributed around their mean, with a variance as
// large as it.
template <class W>
Chunks mean_chunks(const GroupedProblemOf<W> &problem, const ExpertsCost &cost) {
  constexpr double kOctiles[] = {0.157, 0.489, 0.887, 1.534};  // the middles of eight equal parts
  const int tile_m = kMatmulConfigs[cost.config].tile_m;
  const double mean = static_cast<double>(problem.m) / problem.experts;
  Chunks chunks;
  for (const double octile : kOctiles)
    for (const double sign : {-1.0, 1.0}) {
      const double rows = std::max(0.0, mean + sign * octile * std::sqrt(mean));
      const double count = std::ceil(rows / tile_m);
      if (count == 0) continue;
      chunks.count += count / 8;
      chunks.cycles +=
          count / 8 *
          tile_cycles(cost, problem.x_columns(), static_cast<int>(std::ceil(rows / count)));
    }
  const double most = static_cast<double>(max_chunks(problem, tile_m)) / problem.experts;
  const double share = std::min(1.0, most / chunks.count);
  return {chunks.count * share, chunks.cycles * share};
}

// A launch, and x read and written. Fitted to an earlier gather, which took 12 us more for 4096
// tokens of Qwen3's experts, and kept so that choices stay.
template <class W>
double gather_cycles(const GroupedProblemOf<W> &problem, const GpuFacts &gpu) {
  constexpr double kLaunchCycles = 4000, kBytesPerCycle = 20;  // bytes: one multiprocessor's
  return kLaunchCycles + static_cast<double>(problem.m * problem.x_columns() * 4) /
                             (kBytesPerCycle * gpu.multiprocessors);
}

template <class W>
double estimated_cycles(const GroupedProblemOf<W> &problem, const GpuFacts &gpu,
                        const ExpertsCost &cost) {
  const Chunks chunks = mean_chunks(problem, cost);
  const double n_tiles =
      static_cast<double>(problem.experts * expert_n_tiles(problem, cost.config));
  const double cycles = chunks.cycles * n_tiles / gpu.multiprocessors;
  // Skinny CTAs share tiles; of others the last wave is half full, on average.
  if (is_mma(cost.config) || is_skinny(cost.config) || chunks.count == 0) return cycles;
  const double tile = chunks.cycles / chunks.count;
  return std::max(tile, cycles + tile / 2) +
         (is_wgmma(cost.config) && problem.x_index != nullptr ? gather_cycles(problem, gpu) : 0);
}

template <class W>
bool wgmma_can_run_experts(const GroupedProblemOf<W> &problem, const GpuFacts &gpu, int config) {
  const bool has_x = problem.x_index != nullptr
                         ? gathered_bytes(problem) > 0
                         : problem.x_rows > 0 && problem.x_rows <= kMaxMapRows;
  const W stack = stack_weight(problem);
  return has_experts_kernel(kind_of(problem.weight), config) && has_x && problem.m <= kMaxMapRows &&
         stack.rows <= kMaxMapRows && stack.cols <= kMaxMapRows &&
         begins_words(problem.weight, problem.expert_rows()) &&
         wgmma_shape_can_run(two_rows(problem, wgmma_weight(problem)), gpu, config);
}

template <class W>
bool multistage_can_run_experts(const GroupedProblemOf<W> &problem, const GpuFacts &gpu,
                                int config) {
  return has_experts_kernel(kind_of(problem.weight), config) && problem.x_rows > 0 &&
         problem.m <= kMaxMapRows &&
         multistage_can_run(two_rows(problem, stack_weight(problem)), gpu, config);
}

}  // namespace

template <class W>
bool grouped_can_run(const GroupedProblemOf<W> &problem, const GpuFacts &gpu, int config) {
  if (is_mma(config)) return true;
  // Numbers of tiles have 31 bits.
  if (max_chunks(problem, kMatmulConfigs[config].tile_m) >
      std::numeric_limits<int>::max() / 2 / expert_n_tiles(problem, config))
    return false;
  if (is_multistage(config)) return multistage_can_run_experts(problem, gpu, config);
  return is_skinny(config) ? skinny_can_run_experts(problem, gpu, config)
                           : wgmma_can_run_experts(problem, gpu, config);
}

template <class W>
int choose_grouped(const GroupedProblemOf<W> &problem, const GpuFacts &gpu) {
  int best = kMma64x64;
  double least = std::numeric_limits<double>::infinity();
  for (const ExpertsCost &cost : experts_costs(problem.weight)) {
    if (gpu.wgmma && is_multistage(cost.config)) continue;
    if (!grouped_can_run(problem, gpu, cost.config)) continue;
    const double cycles = estimated_cycles(problem, gpu, cost);
    if (cycles >= least) continue;
    best = cost.config;
    least = cycles;
  }
  return best;
}

#define NF4_CHOOSE_GROUPED(W)                                                               \
  template bool grouped_can_run(const GroupedProblemOf<W> &, const GpuFacts &, int config); \
  template int choose_grouped(const GroupedProblemOf<W> &, const GpuFacts &);
NF4_CHOOSE_GROUPED(Weight)
NF4_CHOOSE_GROUPED(TransposedWeight)
NF4_CHOOSE_GROUPED(Int4Weight)
#undef NF4_CHOOSE_GROUPED

}  // namespace nf4::cuda
