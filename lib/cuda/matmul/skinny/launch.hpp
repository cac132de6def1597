// Which skinny kernel a product takes, and its launch.
#pragma once

#include "cuda/matmul/skinny/args.hpp"
#include "cuda/runtime/device.hpp"
#include "cuda/runtime/families.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Whether the family's skinny kernel of this configuration can run the problem on the device.
bool skinny_can_run(const GpuFamily &family, const MatmulProblem &problem, int config,
                    const Device &device);

// The family's fastest skinny configuration for a problem; kMma64x64 if none can run it.
int choose_skinny(const GpuFamily &family, const MatmulProblem &problem, const Device &device);

// `kernel` is one of the family's, and may use all the shared memory of a CTA.
cudaError_t launch_skinny(const GpuFamily &family, const void *kernel, const MatmulArgs &matmul,
                          nf4_dtype dtype, int config, const Device &device, cudaStream_t stream);

// The products of one launch, which have their configuration, dtype and kind of scales in common.
struct SkinnyBatchProblems {
  const MatmulProblem *list[kSkinnyBatchMax];
  int count = 0;
};

// Whether one more fits into the launch. Each of them alone takes a skinny kernel.
bool joins_launch(const SkinnyBatchProblems &problems, const MatmulProblem &problem,
                  const Device &device);

// As launch_skinny, with a kernel for several weights.
cudaError_t launch_skinny_batch(const GpuFamily &family, const void *kernel,
                                const MatmulArgs *matmuls, int count, nf4_dtype dtype, int config,
                                const Device &device, cudaStream_t stream);

}  // namespace nf4::cuda
