// The matmul kernels of a GPU family (runtime/families.hpp). Hopper's wgmma kernels are beside
// them.
#pragma once

#include "cuda/matmul/configs.hpp"

namespace nf4::cuda {

struct MatmulKernels {
  // [dtype - NF4_DTYPE_FP16][nested][configuration]; NULL: there is none. Args: MatmulArgs of mma
  // kernels, SkinnyArgs of skinny kernels.
  const void *of[2][2][kFamilyConfigCount];
  // For several weights in one launch, args: SkinnyBatch. NULL for mma kernels.
  const void *batch[2][2][kFamilyConfigCount];

  template <class Arch>
  static MatmulKernels make();
};

}  // namespace nf4::cuda
