// Adapters (LoRA) of a product: the launch of x A^T, and the arguments that the product's kernels
// get.
#pragma once

#include "cuda/lora/args.hpp"
#include "cuda/lora/cta_args.hpp"
#include "cuda/runtime/target.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// A product with an adapter, x times `in`, times `out`. In its gradient A and B change places.
struct LoraProblem {
  nf4_dtype dtype;
  int64_t m;
  const void *x;
  int64_t x_stride;
  int64_t cols;  // columns of x
  int64_t rows;  // outputs per row of x
  Lora lora;
  LoraFactor in;   // A, or the transpose of B
  LoraFactor out;  // B, or the transpose of A
  bool gradient;

  explicit LoraProblem(const MatmulProblem &problem);
  explicit LoraProblem(const GradProblem &problem);
};

// The term that epilogues add. `workspace` is the adapter's part (lora/workspace.hpp), on a 16-byte
// boundary.
LoraTerm lora_term_of(const LoraProblem &problem, void *workspace);

// Tells whether a skinny kernel computes the product itself (lora/ctas.cuh), and makes its
// arguments for one launch.
bool has_lora_ctas(const LoraProblem &problem);
LoraCtaArgs lora_cta_args(const LoraProblem &problem, void *workspace);

// `out` in the form that TMA loads: in place if it is aligned and in x's dtype, otherwise its copy.
struct LoraMatrix {
  const void *data;
  int64_t rows;
  int64_t stride;  // in elements
  int ranks;       // the copy also has zeros past the adapter's
};
LoraMatrix lora_out_for_tma(const LoraProblem &problem, void *workspace);

// The way in which x is multiplied by `in` for a wgmma kernel.
struct LoraPlan {
  // Each on a multiprocessor, while that kernel runs; 0: on all multiprocessors before it.
  int persistent_ctas;
  double cycles;  // estimated cycles of those CTAs
};
LoraPlan plan_lora(const Device &device, const LoraProblem &problem);

// Enqueues x times `in`. Also enqueues the copy of `out` if a wgmma kernel loads it and needs one.
cudaError_t launch_lora_product(const LaunchTarget &target, const LoraProblem &problem,
                                void *workspace, bool wgmma);

// Loads the kernels that run beside wgmma kernels, if the device has them.
cudaError_t load_lora_tma_kernels(const Device &device);

}  // namespace nf4::cuda
