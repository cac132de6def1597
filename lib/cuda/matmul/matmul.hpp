// The host side of products and their gradient, as device_info, tests and benchmarks see it.
// product.cpp implements it.
#pragma once

#include <optional>

#include "cuda/costs/costs.hpp"
#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/runtime/device.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Whether the family has kernels of this configuration, for weights with a codebook, on a GPU of
// this compute capability.
bool matmul_has(const GpuFamily &family, int config, int compute_capability);
bool matmul_grad_has(const GpuFamily &family, int config, int compute_capability);

// The configuration that a launch on the stream would use, forced or not.
nf4_status matmul_config(const MatmulProblem &problem, nf4_stream stream, int &config);
nf4_status matmul_config(const Int4MatmulProblem &problem, nf4_stream stream, int &config);
nf4_status matmul_grad_config(const MatmulProblem &problem, nf4_stream stream, int &config);

// The same for a target whose device is current, and for the times that costs give (times_on()).
cudaError_t choose_matmul(const MatmulTarget &target, const MatmulProblem &problem,
                          const StrategyTimes &times, int &config);
cudaError_t choose_matmul(const MatmulTarget &target, const Int4MatmulProblem &problem,
                          const StrategyTimes &times, int &config);
cudaError_t choose_matmul(const MatmulTarget &target, const GradProblem &problem,
                          const StrategyTimes &times, int &config);

// For tests: sets the configuration of every later launch; kMma64x64 stands in where it cannot run
// the problem. An empty value restores the library's choice. Not thread safe.
void force_matmul(std::optional<int> config);
void force_matmul_grad(std::optional<int> config);

// Loads the kernels of products and gradients on the device, which is current.
cudaError_t load_matmul_kernels(const GpuFamily &family, const Device &device);

}  // namespace nf4::cuda
