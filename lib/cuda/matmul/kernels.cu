// Instantiates the mma and skinny kernels of weights with a codebook for one GPU family; compiled
// once for each family.
#include <type_traits>

#include "cuda/arch.cuh"
#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/mma/codebook_source.cuh"
#include "cuda/matmul/mma/kernel.cuh"
#include "cuda/matmul/skinny/kernel.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class Scales, class WarpMma>
void set_skinny_kernels(MatmulKernels::Skinny &skinny, int dtype, int config) {
  const int index = config - kFirstSkinny;
  skinny.one[dtype][Scales::kKind][index] =
      (const void *)matmul_skinny<Arch, T, Scales, WarpMma, false>;
  // Turing's kernels take no adapter.
  if constexpr (Arch::kTensorCores)
    skinny.lora[dtype][Scales::kKind][index] =
        (const void *)matmul_skinny<Arch, T, Scales, WarpMma, true>;
  skinny.batch[dtype][Scales::kKind][index] =
      (const void *)matmul_skinny_batch<Arch, T, Scales, WarpMma>;
}

// The kernels of a configuration in 16 bits, in each layout.
template <class Arch, class T, class Scales, class WarpMma>
void set_skinny_layouts(MatmulKernels &kernels, int dtype, int config) {
  using Narrow = NarrowMma<WarpMma, kNarrowSkinny>;
  if constexpr (has_wide_skinny(WarpMma::kMaxM, Arch::kTensorMaps, /*experts=*/false))
    set_skinny_kernels<Arch, T, Scales, WarpMma>(kernels.skinny[kWideSkinny], dtype, config);
  set_skinny_kernels<Arch, T, Scales, Narrow>(kernels.skinny[kNarrowSkinny], dtype, config);
}

template <class Arch, class T, class Scales, class WarpMma>
void set_turing_skinny(MatmulKernels &kernels, int dtype, int config) {
  using Turing = NarrowMma<WarpMma, kTuringSkinny>;
  set_skinny_kernels<Arch, T, Scales, Turing>(kernels.skinny[kTuringSkinny], dtype, config);
}

template <class Arch, class T, class Scales>
void set_kernels(MatmulKernels &kernels, int dtype) {
  kernels.mma[dtype][Scales::kKind] =
      (const void *)matmul_mma<Arch, T, CodebookSource<Arch, Scales>>;
  if constexpr (std::is_same_v<T, float> && Scales::kLowNibbleFirst) {
    return;
  } else if constexpr (Arch::kTensorCores && std::is_same_v<T, float>) {
    MatmulKernels::Skinny &skinny = kernels.skinny[kWideSkinny];
    set_skinny_kernels<Arch, T, Scales, WarpMmaFp32M2>(skinny, dtype, kSkinny2);
    set_skinny_kernels<Arch, T, Scales, WarpMmaFp32<1>>(skinny, dtype, kSkinny8);
    set_skinny_kernels<Arch, T, Scales, WarpMmaFp32<2>>(skinny, dtype, kSkinny16);
  } else if constexpr (Arch::kTensorCores) {
    set_skinny_layouts<Arch, T, Scales, SkinnyMmaM2<T, Scales>>(kernels, dtype, kSkinny2);
    set_skinny_layouts<Arch, T, Scales, SkinnyMmaM8<T, Scales, 1>>(kernels, dtype, kSkinny8);
    set_skinny_layouts<Arch, T, Scales, SkinnyMmaM8<T, Scales, 2>>(kernels, dtype, kSkinny16);
  } else if constexpr (std::is_same_v<T, __half>) {
    set_turing_skinny<Arch, T, Scales, SkinnyMmaM2<T, Scales, Arch>>(kernels, dtype, kSkinny2);
    set_turing_skinny<Arch, T, Scales, SkinnyMmaM8<T, Scales, 1, Arch>>(kernels, dtype, kSkinny8);
    set_turing_skinny<Arch, T, Scales, SkinnyMmaM8<T, Scales, 2, Arch>>(kernels, dtype, kSkinny16);
  }
}

}  // namespace

template <class Arch>
MatmulKernels MatmulKernels::make() {
  MatmulKernels kernels{};
  set_kernels<Arch, float, FlatScales>(kernels, 0);
  set_kernels<Arch, float, NestedScales>(kernels, 0);
  set_kernels<Arch, __half, FlatScales>(kernels, 1);
  set_kernels<Arch, __half, NestedScales>(kernels, 1);
  set_kernels<Arch, __nv_bfloat16, FlatScales>(kernels, 2);
  set_kernels<Arch, __nv_bfloat16, NestedScales>(kernels, 2);
  set_kernels<Arch, float, ByteScales>(kernels, 0);
  set_kernels<Arch, __half, ByteScales>(kernels, 1);
  set_kernels<Arch, __nv_bfloat16, ByteScales>(kernels, 2);
  return kernels;
}

template MatmulKernels MatmulKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
