// The launch of the multistage kernels.
#pragma once

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/weight/lut_codebook.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Loads the family's kernels for the kind of weight on the device, which is current.
cudaError_t load_multistage_kernels(const GpuFamily &family, const Device &device, const Weight &);
cudaError_t load_multistage_kernels(const GpuFamily &family, const Device &device,
                                    const Int4Weight &);

// The scales of two K-tiles, the first of them even, lie side by side and are aligned.
bool has_scale_pairs(const Weight &weight);

// Enqueues the kernel of a configuration that can run the problem. The target's device is current.
cudaError_t launch_multistage(const MatmulTarget &target, const MatmulProblem &problem,
                              const MatmulArgs &matmul, const LutCodebook &codebook, int config);
cudaError_t launch_multistage(const MatmulTarget &target, const Int4MatmulProblem &problem,
                              const Int4MatmulArgs &matmul, int config);

}  // namespace nf4::cuda
