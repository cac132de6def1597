// Launching the few-row kernels.
#pragma once

#include "cuda/matmul/few_args.hpp"
#include "cuda/runtime/device.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Can the family's few-row kernel of this shape do the problem on the device?
bool few_takes(const MatmulFamily &family, const MatmulProblem &problem, MatmulShape shape,
               const Device &device);

// The family's fastest few-row shape for a problem; kTiled if none takes it.
MatmulShape best_few(const MatmulFamily &family, const MatmulProblem &problem,
                     const Device &device);

// With a kernel of the family, which may have all the shared memory of a thread block.
cudaError_t launch_few(const MatmulFamily &family, const void *kernel, const MatmulArgs &args,
                       nf4_dtype dtype, MatmulShape shape, const Device &device,
                       cudaStream_t stream);

// The products of one launch, which have a shape, a dtype and a layout in common.
struct FewProducts {
  const MatmulProblem *list[kFewBatch];
  int count = 0;
};

// Can one more go into the launch? Each of them, alone, is one for a few-row kernel.
bool few_joins(const FewProducts &products, const MatmulProblem &problem, const Device &device);

// As launch_few, with a kernel for several weights; args are those of the products.
cudaError_t launch_few_batch(const MatmulFamily &family, const void *kernel, const MatmulArgs *args,
                             int count, nf4_dtype dtype, MatmulShape shape, const Device &device,
                             cudaStream_t stream);

}  // namespace nf4::cuda
