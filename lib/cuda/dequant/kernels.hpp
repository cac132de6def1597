// The compile matrix of dequantize: 3 dtypes x flat or nested scales x 3 configurations.
#pragma once

#include "cuda/dequant/configs.hpp"

namespace nf4::cuda {

// The kernels of one GPU family (runtime/families.hpp).
struct DequantKernels {
  const void *of[3][2][kDequantConfigCount];  // [dtype - 1][nested][config]; args: DequantArgs

  template <class Arch>
  static DequantKernels make();
};

}  // namespace nf4::cuda
