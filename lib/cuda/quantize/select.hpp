// Which quantize kernels run on a device.
#pragma once

#include "cuda/quantize/args.hpp"
#include "cuda/runtime/device.hpp"

namespace nf4::cuda {

// All families of this build, best first; the last is the baseline. Ends in NULL.
const QuantizeFamily *const *quantize_families();

// For tests: the family that every later launch uses; NULL restores the library's choice.
// Not thread safe.
void force_quantize(const QuantizeFamily *family);

// Loads the kernels for the compute capability on the current device, if there are any.
cudaError_t load_quantize_kernels(int compute_capability);

}  // namespace nf4::cuda
