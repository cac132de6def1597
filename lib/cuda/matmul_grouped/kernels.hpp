// The mma, skinny and multistage kernels of a grouped matmul for a GPU family
// (runtime/families.hpp). The tables of matmul/wgmma/launch.hpp have its wgmma kernels.
#pragma once

#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/skinny/smem.hpp"

namespace nf4::cuda {

// [dtype - NF4_DTYPE_FP16], then [nested], or of integers [layout - NF4_INT4_GPTQ]. The args of mma
// kernels are GroupedArgsOf<>.
struct GroupedKernels {
  const void *mma[2][2];
  const void *grad_mma[2][2];
  const void *int4_mma[2][3];
  // args: GroupedSkinnyArgs, by layout, and GroupedInt4SkinnyArgs; NULL: there is none
  const void *skinny[kSkinnyLayoutCount][2][2][kSkinnyCount];
  const void *int4_skinny[2][3][kSkinnyCount];

  template <class Arch>
  static GroupedKernels make();
};

// The multistage kernels, for weights with a codebook; args: GroupedMultistageArgs. NULL: there is
// none.
struct GroupedMultistageKernels {
  const void *of[2][kMultistageCount];  // [dtype - NF4_DTYPE_FP16][config - kFirstMultistage]

  template <class Arch>
  static GroupedMultistageKernels make();
};

}  // namespace nf4::cuda
