// The launch configurations that the sweep compares.
#pragma once

#include <vector>

#include "cuda/dequant/configs.hpp"

namespace nf4::bench {

struct Configuration {
  cuda::DequantTiling tiling;
  const void *kernels[3];  // [dtype - 1], nested: DequantArgs
};

// None where the sm90 family is not compiled.
const std::vector<Configuration> &configurations();

}  // namespace nf4::bench
