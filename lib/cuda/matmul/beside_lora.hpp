// The plan of a wgmma kernel while an adapter's product occupies some multiprocessors. Calls no
// CUDA, so a test without a GPU covers it.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/matmul/choose.hpp"

namespace nf4::cuda {

// Returns by how many cycles a plan for all multiprocessors ends late if its last `late` CTAs start
// `cycles` late. CTAs start in order; without stream-K the last ones often have a tile less. If
// none is late, the epilogues of the first tiles still wait for the adapter's product.
inline double delay_of(const WgmmaPlan &plan, int multiprocessors, int late, double cycles) {
  const int64_t beyond = plan.tiles() % plan.clusters;
  const bool even = plan.stream_k_tiles > 0 || beyond == 0;
  const int64_t busiest = (even ? plan.clusters : beyond) * plan.cluster_size;
  if (busiest > multiprocessors - late) return cycles;
  const auto tiles = static_cast<double>(ceil_divide(plan.tiles(), plan.clusters));
  return std::max(0.0, cycles - plan.cycles / tiles);
}

// Replaces a choice for all multiprocessors by one for those that the product's `ctas` leave free,
// if that is faster. `forced` restricts the choice to one configuration.
template <class Problem>
void choose_beside_lora(const Problem &problem, int ctas, double cycles, GpuFacts gpu,
                        const CostModel &model, std::optional<int> forced, MatmulChoice &choice) {
  if (ctas == 0 || !is_wgmma(choice.config)) return;
  const double delay = delay_of(choice.plan, gpu.multiprocessors, ctas, cycles);
  if (delay == 0) return;
  leave_multiprocessors(ctas, gpu);
  MatmulChoice left{kMma64x64, {}};
  choose_wgmma(problem, gpu, model, forced, left);
  if (is_wgmma(left.config) && left.plan.cycles < choice.plan.cycles + delay) choice = left;
}

}  // namespace nf4::cuda
