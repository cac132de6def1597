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

// For integer weights; args: Int4MultistageArgs.
struct Int4MultistageKernels {
  // [dtype - NF4_DTYPE_FP16][layout - NF4_INT4_GPTQ][config - kFirstMultistage]
  const void *of[2][3][kMultistageCount];

  template <class Arch>
  static Int4MultistageKernels make();
};

// For the gradient; args: MultistageArgs.
struct GradMultistageKernels {
  const void *of[2][kMultistageCount];  // as above, of weights with a codebook

  template <class Arch>
  static GradMultistageKernels make();
};

}  // namespace nf4::cuda
