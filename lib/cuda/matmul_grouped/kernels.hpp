// The mma, skinny and multistage kernels of a grouped matmul for a GPU family
// (runtime/families.hpp). The tables of matmul/wgmma/launch.hpp have its wgmma kernels.
#pragma once

#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/skinny/smem.hpp"
#include "cuda/weight/view.hpp"

namespace nf4::cuda {

// [dtype - NF4_DTYPE_FP16], then [scale_kind()], or of integers [layout - NF4_INT4_GPTQ]. The args
// of mma kernels are GroupedArgsOf<>.
struct GroupedKernels {
  const void *mma[2][kScaleKindCount];
  const void *grad_mma[2][kScaleKindCount];
  const void *int4_mma[2][3];
  // args: GroupedSkinnyArgs, by layout, and GroupedInt4SkinnyArgs; NULL: there is none
  const void *skinny[kSkinnyLayoutCount][2][kScaleKindCount][kSkinnyCount];
  const void *int4_skinny[2][3][kSkinnyCount];

  template <class Arch>
  static GroupedKernels make();
};

// The multistage kernels, for weights with a codebook; args: GroupedMultistageArgs. NULL: there is
// none.
struct GroupedMultistageKernels {
  // [MXFP4 or NVFP4][dtype - NF4_DTYPE_FP16][config - kFirstMultistage]
  const void *of[2][2][kMultistageCount];

  template <class Arch>
  static GroupedMultistageKernels make();
};

}  // namespace nf4::cuda
