// The launch of the multistage kernels.
#pragma once

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/weight/lut_codebook.hpp"
#include "problem.hpp"

namespace nf4::cuda {

cudaError_t load_multistage_kernels(const GpuFamily &family, const Device &device);

// The scales of two K-tiles, the first of them even, lie side by side and are aligned.
bool has_scale_pairs(const Weight &weight);

// Enqueues the kernel of a configuration that can run the problem. The target's device is current.
cudaError_t launch_multistage(const MatmulTarget &target, const MatmulProblem &problem,
                              const MatmulArgs &matmul, const LutCodebook &codebook, int config);

}  // namespace nf4::cuda
