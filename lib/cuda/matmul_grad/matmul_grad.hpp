// The host side of the gradient, as device_info, tests and benchmarks see it.
#pragma once

#include <optional>

#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/runtime/device.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Whether the family has kernels of this configuration for a GPU of this compute capability.
bool matmul_grad_has(const GpuFamily &family, int config, int compute_capability);

// The configuration that a launch on the stream would use, forced or not.
nf4_status matmul_grad_config(const MatmulProblem &problem, nf4_stream stream, int &config);

// The same for a target whose device is current.
cudaError_t choose_matmul_grad(const MatmulTarget &target, const GradProblem &problem, int &config);

// For tests: the configuration of every later launch, or kMma64x64 where it cannot run the problem;
// empty restores the library's choice. Not thread safe.
void force_matmul_grad(std::optional<int> config);

// Loads the family's kernels on the device, which is current.
cudaError_t load_matmul_grad_kernels(const GpuFamily &family, const Device &device);

}  // namespace nf4::cuda
