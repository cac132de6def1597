// Finds the device that a launch runs on.
#pragma once

#include <cuda_runtime.h>

#include "cuda/runtime/device.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// The device that holds the operands of one product or several, or the stream's device if all of
// them are managed or host memory. Fails if they are on different devices, out of the device's
// reach, or on another device than the stream. A stream cannot be asked for its device during
// capture, nor a default stream at all: then the operands decide, or the current device. Messages
// number several products from 0.
nf4_status locate(const Operands *const *products, int count, cudaStream_t stream, Device &device);

}  // namespace nf4::cuda
