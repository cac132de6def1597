// Adapters (LoRA) beside a product: the launch of x A^T, and what the product's kernels get of it.
#pragma once

#include "cuda/lora/args.hpp"
#include "cuda/lora/cta_args.hpp"
#include "cuda/runtime/target.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// A product with an adapter, or its gradient, where A and B change places: x times `in`, times
// `out`.
struct LoraProblem {
  nf4_dtype dtype;
  int64_t m;
  const void *x;
  int64_t x_stride;
  int64_t cols;  // of x
  int64_t rows;  // outputs of a row of x
  Lora lora;
  LoraFactor in;   // A, or the transpose of B
  LoraFactor out;  // B, or the transpose of A
  bool gradient;

  explicit LoraProblem(const MatmulProblem &problem);
  explicit LoraProblem(const GradProblem &problem);
};

// What epilogues add. `workspace` is the adapter's part (lora/workspace.hpp), on 16 bytes.
LoraTerm lora_term_of(const LoraProblem &problem, void *workspace);

// Whether a skinny kernel makes the product itself (lora/ctas.cuh), and what it gets, for one
// launch.
bool has_lora_ctas(const LoraProblem &problem);
LoraCtaArgs lora_cta_args(const LoraProblem &problem, void *workspace);

// `out` as TMA loads it: where it lies in x's dtype, aligned, else its copy.
struct LoraMatrix {
  const void *data;
  int64_t rows;
  int64_t stride;  // elements
  int ranks;       // with zeros past the adapter's, in the copy
};
LoraMatrix lora_out_for_tma(const LoraProblem &problem, void *workspace);

// How x is multiplied by `in` for a wgmma kernel.
struct LoraPlan {
  int persistent_ctas;  // on a multiprocessor each, beside that kernel; 0: on all before it
  double cycles;        // of those, estimated
};
LoraPlan plan_lora(const Device &device, const LoraProblem &problem);

// Enqueues x times `in`, and the copy of `out` if a wgmma kernel is to load it and needs one.
cudaError_t launch_lora_product(const LaunchTarget &target, const LoraProblem &problem,
                                void *workspace, bool wgmma);

// Loads the kernels that run beside wgmma kernels, where the device has them.
cudaError_t load_lora_tma_kernels(const Device &device);

}  // namespace nf4::cuda
