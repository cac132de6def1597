// The multistage kernels of a GPU family (runtime/families.hpp). NULL: the family has none.
#pragma once

#include "cuda/matmul/configs.hpp"

namespace nf4::cuda {

// For weights with a codebook; args: MultistageArgs.
struct MultistageKernels {
  // [MXFP4 or NVFP4][dtype - NF4_DTYPE_FP16][config - kFirstMultistage]
  const void *of[2][2][kMultistageCount];

  template <class Arch>
  static MultistageKernels make();
};

// For integer weights; args: Int4MultistageArgs.
struct Int4MultistageKernels {
  // [dtype - NF4_DTYPE_FP16][layout - NF4_INT4_GPTQ][config - kFirstMultistage]
  const void *of[2][3][kMultistageCount];

  template <class Arch>
  static Int4MultistageKernels make();
};

// For the gradient; args: MultistageArgs.
struct GradMultistageKernels {
  const void *of[2][kMultistageCount];  // indexed as above, without MXFP4 and NVFP4

  template <class Arch>
  static GradMultistageKernels make();
};

}  // namespace nf4::cuda
