// Where the launches of a call go.
#pragma once

#include "cuda/matmul/choose.hpp"
#include "cuda/runtime/device.hpp"
#include "cuda/runtime/families.hpp"

namespace nf4::cuda {

struct MatmulTarget {
  Device device;
  const GpuFamily *family;
  GpuFacts gpu;
  cudaStream_t stream;
};

}  // namespace nf4::cuda
