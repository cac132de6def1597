// Which quantize kernels run on a device.
#pragma once

#include "cuda/device.hpp"

namespace nf4::cuda {

// Loads the kernels for the compute capability on the current device, if there are any.
cudaError_t load_quantize_kernels(int compute_capability);

}  // namespace nf4::cuda
