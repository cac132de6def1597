// The matmul kernels of a GPU family (runtime/families.hpp), a table for each kind of weight.
// Hopper's wgmma kernels are beside them.
#pragma once

#include "cuda/matmul/configs.hpp"

namespace nf4::cuda {

// The last index is the configuration; NULL: there is none. Args: MatmulArgs of mma kernels,
// SkinnyArgs of skinny kernels.
struct MatmulKernels {
  // [dtype - NF4_DTYPE_FP32][nested][configuration]
  const void *of[3][2][kFamilyConfigCount];
  // Of skinny kernels for products with an adapter.
  const void *lora[3][2][kFamilyConfigCount];
  // For several weights in one launch, args: SkinnyBatch. NULL for mma kernels.
  const void *batch[3][2][kFamilyConfigCount];

  template <class Arch>
  static MatmulKernels make();
};

// Integer weights. Args: Int4MatmulArgs of mma kernels; of skinny kernels Int4SkinnyArgs, or
// StripArgs where takes_strips().
struct Int4MatmulKernels {
  // [dtype - NF4_DTYPE_FP16][layout - NF4_INT4_GPTQ][has g_idx][configuration]
  const void *of[2][3][2][kFamilyConfigCount];
  // [dtype - NF4_DTYPE_FP16][layout - NF4_INT4_GPTQ][configuration]: those of wide strips, where
  // `of` has those of narrow ones.
  const void *wide[2][3][kFamilyConfigCount];

  template <class Arch>
  static Int4MatmulKernels make();
};

// Their kMma64x64 for up to kFewRowsOfX rows of x; NULL without tensor cores. Args: Int4FewArgs.
struct Int4FewKernels {
  const void *of[2][3][2];

  template <class Arch>
  static Int4FewKernels make();
};

}  // namespace nf4::cuda
