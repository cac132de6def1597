// The gradient's mma and skinny kernels of a GPU family (runtime/families.hpp). The tables of
// matmul/wgmma/launch.hpp have its wgmma kernels.
#pragma once

#include "cuda/weight/view.hpp"

namespace nf4::cuda {

// Args: MatmulArgs of W^T of mma kernels, GradStripArgs of skinny kernels.
struct GradKernels {
  const void *mma[3][kScaleKindCount];  // [dtype - NF4_DTYPE_FP32][scale_kind()]
  // [dtype - NF4_DTYPE_FP16][nested][configuration - kSkinny8]; NULL without tensor maps.
  const void *skinny[2][2][2];

  template <class Arch>
  static GradKernels make();
};

}  // namespace nf4::cuda
