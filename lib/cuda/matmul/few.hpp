// Launching the few-row kernels.
#pragma once

#include "cuda/device.hpp"
#include "cuda/matmul/args.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Can a few-row kernel of this shape do the problem on the device?
bool few_takes(const MatmulProblem &problem, MatmulShape shape, const Device &device);

// With a kernel of the family, which may have all the shared memory of a thread block.
cudaError_t launch_few(const MatmulFamily &family, const void *kernel, const MatmulArgs &args,
                       nf4_dtype dtype, MatmulShape shape, const Device &device,
                       cudaStream_t stream);

}  // namespace nf4::cuda
