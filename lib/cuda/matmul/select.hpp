// Which matmul kernels run on a device.
#pragma once

#include <optional>

#include "cuda/matmul/args.hpp"
#include "cuda/runtime/device.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// All families of this build, best first; the last is the baseline. Ends in NULL.
const MatmulFamily *const *matmul_families();

// Are there kernels of this shape for a GPU of this compute capability in the family?
bool matmul_has(const MatmulFamily &family, MatmulShape shape, int compute_capability);

// What tests and benchmarks call a shape.
const char *matmul_shape_name(MatmulShape shape);

// The shape that a launch on the stream would use, forced or not.
nf4_status matmul_shape(const MatmulProblem &problem, nf4_stream stream, MatmulShape &shape);

// For tests: the family and the shape that every later launch uses, the latter as far as it
// takes the problem; NULL and none restore the library's choice. Not thread safe.
void force_matmul(const MatmulFamily *family, std::optional<MatmulShape> shape);

// Loads the kernels for the compute capability on the current device, if there are any.
cudaError_t load_matmul_kernels(const Device &device);

}  // namespace nf4::cuda
