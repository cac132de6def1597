// Adapters (LoRA) beside a product: the launch of x A^T, and what the product's kernels get of it.
#pragma once

#include "cuda/lora/args.hpp"
#include "cuda/runtime/target.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// What epilogues add. `workspace` is the adapter's part (lora/workspace.hpp), on 16 bytes.
LoraTerm lora_term_of(const MatmulProblem &problem, void *workspace);

// B as TMA loads it: where it lies in x's dtype, aligned, else its copy.
struct LoraMatrix {
  const void *data;
  int64_t stride;  // elements
  int ranks;       // with zeros past the adapter's, in the copy
};
LoraMatrix lora_b_for_tma(const MatmulProblem &problem, void *workspace);

// Enqueues x A^T, and the copy of B if TMA is to load it and needs one.
cudaError_t launch_lora_product(const LaunchTarget &target, const MatmulProblem &problem,
                                void *workspace, bool tma);

}  // namespace nf4::cuda
