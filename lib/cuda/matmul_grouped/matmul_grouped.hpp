// The host side of grouped products, as device_info, tests and benchmarks see it.
#pragma once

#include <optional>

#include "cuda/matmul/configs.hpp"
#include "cuda/runtime/device.hpp"
#include "cuda/runtime/families.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// Whether the family has grouped kernels of this kind of weight (TransposedWeight: the gradient)
// and configuration for a GPU of this compute capability.
template <class W>
bool matmul_grouped_has(const GpuFamily &family, int config, int compute_capability);

// The configuration that a launch on the stream would use, forced or not.
nf4_status matmul_grouped_config(const GroupedProblem &problem, nf4_stream stream, int &config);
nf4_status matmul_grouped_config(const Int4GroupedProblem &problem, nf4_stream stream, int &config);

// For tests: the configuration of every later launch, or kMma64x64 where it cannot run the problem;
// empty restores the library's choice. Not thread safe.
void force_matmul_grouped(std::optional<int> config);

// Loads the family's kernels on the device, which is current.
cudaError_t load_matmul_grouped_kernels(const GpuFamily &family, const Device &device);

}  // namespace nf4::cuda
