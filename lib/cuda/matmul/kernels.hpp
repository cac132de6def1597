// The mma and skinny kernels of a GPU family (runtime/families.hpp), a table for weights with a
// codebook and one for integers. matmul_grad/kernels.hpp has those of the gradient, and
// wgmma/launch.hpp has the wgmma kernels. NULL: there is no such kernel.
#pragma once

#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/skinny/smem.hpp"
#include "cuda/weight/view.hpp"

namespace nf4::cuda {

// Weights with a codebook.
struct MatmulKernels {
  // [dtype - NF4_DTYPE_FP32][scale_kind()]; args: MatmulArgs
  const void *mma[3][kScaleKindCount];
  // [dtype - NF4_DTYPE_FP32][scale_kind()][configuration - kFirstSkinny]
  struct Skinny {
    using Kernels = const void *[3][kScaleKindCount][kSkinnyCount];
    Kernels one;    // args: SkinnyArgs
    Kernels lora;   // for a product with an adapter; args: SkinnyArgs
    Kernels batch;  // for several weights in one launch; args: SkinnyBatch
  };
  Skinny skinny[kSkinnyLayoutCount];

  template <class Arch>
  static MatmulKernels make();
};

// Integer weights.
struct Int4MatmulKernels {
  // [dtype - NF4_DTYPE_FP16][layout - NF4_INT4_GPTQ][has g_idx]
  const void *mma[2][3][2];  // args: Int4MatmulArgs
  const void *few[2][3][2];  // for up to kFewRowsOfX rows of x; args: Int4FewArgs
  // [dtype - NF4_DTYPE_FP16][layout - NF4_INT4_GPTQ][configuration - kFirstSkinny]
  struct {
    // Args: StripArgs where takes_strips(), for narrow strips; else Int4SkinnyArgs.
    const void *one[2][3][kSkinnyCount];
    const void *wide[2][3][kSkinnyCount];  // for wide strips; args: StripArgs
  } skinny;

  template <class Arch>
  static Int4MatmulKernels make();
};

}  // namespace nf4::cuda
