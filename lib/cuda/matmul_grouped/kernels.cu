// Instantiates the mma and skinny kernels of a grouped matmul for one GPU family; compiled once for
// each family.
#include "cuda/arch.cuh"
#include "cuda/matmul/mma/codebook_source.cuh"
#include "cuda/matmul/mma/int4_source.cuh"
#include "cuda/matmul_grad/products.cuh"
#include "cuda/matmul_grouped/int4_skinny_kernel.cuh"
#include "cuda/matmul_grouped/kernels.hpp"
#include "cuda/matmul_grouped/mma_kernel.cuh"
#include "cuda/matmul_grouped/skinny_kernel.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class Scales, class WarpMma>
void set_skinny(GroupedKernels &kernels, int dtype, int index) {
  using Narrow = NarrowMma<WarpMma, kNarrowSkinny>;
  if constexpr (has_wide_skinny(WarpMma::kMaxM, Arch::kTensorMaps, /*experts=*/true))
    kernels.skinny[kWideSkinny][dtype][Scales::kKind][index] =
        (const void *)matmul_grouped_skinny<Arch, T, Scales, WarpMma>;
  kernels.skinny[kNarrowSkinny][dtype][Scales::kKind][index] =
      (const void *)matmul_grouped_skinny<Arch, T, Scales, Narrow>;
}

template <class Arch, class T, class Scales, class WarpMma>
void set_turing_skinny(GroupedKernels &kernels, int dtype, int index) {
  kernels.skinny[kTuringSkinny][dtype][Scales::kKind][index] =
      (const void *)matmul_grouped_skinny<Arch, T, Scales, NarrowMma<WarpMma, kTuringSkinny>>;
}

template <class Arch, class T, class Scales>
void set_kernels(GroupedKernels &kernels, int dtype) {
  kernels.mma[dtype][Scales::kKind] =
      (const void *)matmul_grouped_mma<Arch, T, CodebookSource<Arch, Scales>>;
  kernels.grad_mma[dtype][Scales::kKind] = (const void *)
      matmul_grouped_mma<Arch, T, CodebookSource<Arch, Scales, true>, GradProducts<Arch, T>>;
  if constexpr (Arch::kTensorCores) {
    set_skinny<Arch, T, Scales, SkinnyMmaM2<T, Scales>>(kernels, dtype, 0);
    set_skinny<Arch, T, Scales, SkinnyMmaM8<T, Scales, 1>>(kernels, dtype, 1);
    set_skinny<Arch, T, Scales, SkinnyMmaM8<T, Scales, 2>>(kernels, dtype, 2);
  } else if constexpr (std::is_same_v<T, __half>) {
    set_turing_skinny<Arch, T, Scales, SkinnyMmaM2<T, Scales, Arch>>(kernels, dtype, 0);
    set_turing_skinny<Arch, T, Scales, SkinnyMmaM8<T, Scales, 1, Arch>>(kernels, dtype, 1);
    set_turing_skinny<Arch, T, Scales, SkinnyMmaM8<T, Scales, 2, Arch>>(kernels, dtype, 2);
  }
}

template <class Arch, class T, class Layout>
void set_int4_skinny(const void *(&kernels)[kSkinnyCount]) {
  kernels[0] = (const void *)int4_matmul_grouped_skinny<Arch, T, Layout, Int4MmaM2<T, Layout>>;
  kernels[1] = (const void *)int4_matmul_grouped_skinny<Arch, T, Layout, Int4MmaM8<T, Layout, 1>>;
  kernels[2] = (const void *)int4_matmul_grouped_skinny<Arch, T, Layout, Int4MmaM8<T, Layout, 2>>;
}

template <class Arch, class T>
void set_int4_kernels(GroupedKernels &kernels, int dtype) {
  const void *(&mma)[3] = kernels.int4_mma[dtype];
  mma[0] = (const void *)matmul_grouped_mma<Arch, T, Int4Source<Arch, NF4_INT4_GPTQ, false>>;
  mma[1] = (const void *)matmul_grouped_mma<Arch, T, Int4Source<Arch, NF4_INT4_AWQ, false>>;
  mma[2] = (const void *)
      matmul_grouped_mma<Arch, T, Int4Source<Arch, NF4_INT4_COMPRESSED_TENSORS, false>>;
  if constexpr (Arch::kTensorMaps) {
    set_int4_skinny<Arch, T, SkinnyGptq>(kernels.int4_skinny[dtype][0]);
    set_int4_skinny<Arch, T, SkinnyRowPacked>(kernels.int4_skinny[dtype][2]);
  }
}

}  // namespace

template <class Arch>
GroupedKernels GroupedKernels::make() {
  GroupedKernels kernels{};
  set_kernels<Arch, __half, FlatScales>(kernels, 0);
  set_kernels<Arch, __half, NestedScales>(kernels, 0);
  set_kernels<Arch, __nv_bfloat16, FlatScales>(kernels, 1);
  set_kernels<Arch, __nv_bfloat16, NestedScales>(kernels, 1);
  set_kernels<Arch, __half, ByteScales>(kernels, 0);
  set_kernels<Arch, __nv_bfloat16, ByteScales>(kernels, 1);
  set_int4_kernels<Arch, __half>(kernels, 0);
  set_int4_kernels<Arch, __nv_bfloat16>(kernels, 1);
  return kernels;
}

template GroupedKernels GroupedKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
