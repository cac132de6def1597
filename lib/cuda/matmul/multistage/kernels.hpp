// The multistage kernels of a GPU family (runtime/families.hpp). NULL: the family has none.
#pragma once

#include "cuda/matmul/configs.hpp"

namespace nf4::cuda {

// For weights with a codebook; args: MultistageArgs.
struct MultistageKernels {
  const void *of[2][kMultistageCount];  // [dtype - NF4_DTYPE_FP16][config - kFirstMultistage]

  template <class Arch>
  static MultistageKernels make();
};

// The same for the gradient.
struct GradMultistageKernels {
  const void *of[2][kMultistageCount];

  template <class Arch>
  static GradMultistageKernels make();
};

}  // namespace nf4::cuda
