// What every choice of matmul's kernel holds, on any GPU.
#pragma once

#include "cuda/matmul/choose.hpp"
#include "cuda/matmul/workspace.hpp"
#include "support/catch.hpp"
#include "support/choice_cases.hpp"

namespace nf4::test {

// Without resident_clusters, which only a choice reads.
inline cuda::GpuFacts facts_of(const ChoiceGpu &gpu) {
  cuda::GpuFacts facts{};
  facts.multiprocessors = gpu.multiprocessors;
  facts.shared_bytes = gpu.shared_bytes;
  facts.tensor_cores = gpu.compute_capability >= 80;
  facts.tensor_maps = gpu.compute_capability >= 90;
  facts.wgmma = gpu.compute_capability == 90;
  return facts;
}

// Each CTA of a stream-K kernel has flags and sums in the workspace, and all run at the same time.
template <class W>
void check_stream_k_fits(const MatmulProblemOf<W> &problem, const cuda::GpuFacts &gpu) {
  const cuda::MatmulWorkspace workspace(problem);
  for (int config = cuda::kFirstStreamK; config < cuda::kMatmulConfigCount; ++config) {
    if (!cuda::can_run(problem, gpu, config)) continue;
    const cuda::WgmmaPlan plan =
        cuda::plan_wgmma(cuda::size_of(problem), gpu, cuda::cost_model(problem.weight), config);
    const cuda::MatmulConfig &tile = cuda::kMatmulConfigs[config];
    const int64_t ctas = plan.clusters * plan.cluster_size;
    REQUIRE(ctas <= gpu.multiprocessors);
    REQUIRE(ctas <= workspace.ctas);
    REQUIRE(ctas * tile.tile_m * tile.tile_n * 4 <= workspace.sums_bytes);
  }
}

}  // namespace nf4::test
