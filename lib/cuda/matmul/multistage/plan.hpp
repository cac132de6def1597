// How a multistage kernel divides a product. Calls no CUDA, so tests without a GPU cover it.
#pragma once

#include <cstdint>

#include "cuda/matmul/multistage/scheduler.hpp"
#include "cuda/matmul/workspace.hpp"

namespace nf4::cuda {

struct MultistagePlan {
  TileSchedule schedule;
  int64_t ctas;
};

// Plans a configuration that can run the product, with the product's own workspace. There is at
// most one CTA for each multiprocessor, and where CTAs share tiles, the workspace has flags and
// room for the sums of each. `split_k`: the kernels have it, those that need cp.async.
MultistagePlan plan_multistage(const MatmulSize &size, int config, int multiprocessors,
                               bool split_k, const MatmulWorkspace &workspace);

}  // namespace nf4::cuda
