// The compile matrix of dequantize: 3 dtypes x 3 kinds of scales x 3 configurations.
#pragma once

#include "cuda/dequant/configs.hpp"
#include "cuda/weight/view.hpp"

namespace nf4::cuda {

// The kernels of one GPU family (runtime/families.hpp).
struct DequantKernels {
  const void *of[3][kScaleKindCount][kDequantConfigCount];  // [dtype - 1]; args: DequantArgs

  template <class Arch>
  static DequantKernels make();
};

}  // namespace nf4::cuda
