// Launches of the gradient's skinny kernels, and what they can run.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/weight/transposed.hpp"

namespace nf4::cuda {

// The family's kernels may use the device's shared memory only after this, which is current.
cudaError_t allow_grad_skinny(const GpuFamily &family, const Device &device);

// For what can run. `args`: of W^T.
cudaError_t launch_grad_skinny(const MatmulTarget &target, const GradProblem &problem,
                               MatmulArgs args, int config);

}  // namespace nf4::cuda
