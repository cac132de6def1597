// Checks that hold for every choice of matmul's kernel, on any GPU.
#pragma once

#include "cuda/matmul/choose.hpp"
#include "cuda/matmul/workspace.hpp"
#include "support/catch.hpp"
#include "support/choice_cases.hpp"

namespace nf4::test {

// The facts without resident_clusters, which only a choice reads.
inline cuda::GpuFacts facts_of(const ChoiceGpu &gpu) {
  cuda::GpuFacts facts{};
  facts.multiprocessors = gpu.multiprocessors;
  facts.shared_bytes = gpu.shared_bytes;
  facts.fp16_tensor_cores = gpu.compute_capability >= 75;
  facts.tensor_cores = gpu.compute_capability >= 80;
  facts.tensor_maps = gpu.compute_capability >= 90;
  facts.wgmma = gpu.compute_capability == 90;
  return facts;
}

// The FNV-1a hash of numbers, each as 8 bytes, the lowest first.
class NumberHash {
 public:
  void add(int64_t number) {
    for (int bit = 0; bit < 64; bit += 8)
      value_ = (value_ ^ (static_cast<uint64_t>(number) >> bit & 0xff)) * 0x100000001b3;
  }
  void add(const cuda::WgmmaPlan &plan) {
    for (const int64_t number : {plan.n_tiles, plan.m_tiles, plan.clusters, plan.stream_k_tiles})
      add(number);
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

template <class W>
void check_stream_k_fits(const MatmulProblemOf<W> &problem, const cuda::GpuFacts &gpu,
                         const cuda::MatmulWorkspace &workspace) {
  for (int config = cuda::kFirstStreamK; config < cuda::kMatmulConfigCount; ++config) {
    if (!cuda::wgmma_can_run(problem, gpu, config)) continue;
    const cuda::WgmmaPlan plan =
        cuda::plan_wgmma(cuda::size_of(problem), gpu, cuda::cost_model(problem.weight), config);
    const cuda::MatmulConfig &tile = cuda::kMatmulConfigs[config];
    const int64_t ctas = plan.clusters * plan.cluster_size;
    REQUIRE(ctas > 0);
    REQUIRE(ctas <= gpu.multiprocessors);
    REQUIRE(ctas <= workspace.ctas);
    REQUIRE(ctas * tile.tile_m * tile.tile_n * 4 <= workspace.sums_bytes);
  }
}

// Each CTA of a stream-K kernel has flags and sums in the workspace, and all run at the same time:
// on a GPU with this many multiprocessors, and on others around the most that the workspace
// supports.
template <class W>
void check_stream_k_fits(const MatmulProblemOf<W> &problem, cuda::GpuFacts gpu) {
  const cuda::MatmulWorkspace workspace(problem);
  for (const int multiprocessors : {gpu.multiprocessors, 16, 144, 145, 160}) {
    gpu.multiprocessors = multiprocessors;
    check_stream_k_fits(problem, gpu, workspace);
  }
}

}  // namespace nf4::test
