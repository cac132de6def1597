// Instantiates the kernels of integer weights of one GPU family; compiled once for each.
#include "cuda/arch.cuh"
#include "cuda/matmul/kernels.hpp"
#include "cuda/matmul/mma/few_rows.cuh"
#include "cuda/matmul/mma/int4_source.cuh"
#include "cuda/matmul/mma/kernel.cuh"
#include "cuda/matmul/skinny/int4_kernel.cuh"
#include "cuda/matmul/skinny/strip_kernel.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, nf4_int4_layout Layout, bool kByColumn>
struct Kind {
  static constexpr int kDtype = std::is_same_v<T, __half> ? 0 : 1;
  static constexpr int kLayout = Layout - NF4_INT4_GPTQ;
  using Source = Int4Source<Arch, Layout, kByColumn>;

  static void set(Int4MatmulKernels &kernels) {
    const void **const of = kernels.of[kDtype][kLayout][kByColumn];
    of[kMma64x64] = (const void *)matmul_mma<Arch, T, Source>;
    if constexpr (kByColumn)
      return;
    else if constexpr (Layout == NF4_INT4_AWQ)
      set_strip(of);
    else
      set_skinny<std::conditional_t<Layout == NF4_INT4_GPTQ, SkinnyGptq, SkinnyRowPacked>>(of);
  }
  template <class Skinny>
  static void set_skinny(const void **of) {
    if constexpr (Arch::kTensorCores) {
      of[kSkinny2] = (const void *)int4_matmul_skinny<Arch, T, Skinny, Int4MmaM2<T, Skinny>>;
      of[kSkinny8] = (const void *)int4_matmul_skinny<Arch, T, Skinny, Int4MmaM8<T, Skinny, 1>>;
      of[kSkinny16] = (const void *)int4_matmul_skinny<Arch, T, Skinny, Int4MmaM8<T, Skinny, 2>>;
    }
  }
  static void set_strip(const void **of) {
    if constexpr (Arch::kTensorMaps) {
      of[kSkinny8] = (const void *)int4_matmul_strip<Arch, T, StripAwq, 1>;
      of[kSkinny16] = (const void *)int4_matmul_strip<Arch, T, StripAwq, 2>;
    }
  }
  static void set(Int4FewKernels &kernels) {
    if constexpr (Arch::kTensorCores)
      kernels.of[kDtype][kLayout][kByColumn] = (const void *)matmul_mma_few<Arch, T, Source>;
  }
};

template <class Arch, class T, class Kernels>
void set_kernels(Kernels &kernels) {
  Kind<Arch, T, NF4_INT4_GPTQ, false>::set(kernels);
  Kind<Arch, T, NF4_INT4_GPTQ, true>::set(kernels);
  Kind<Arch, T, NF4_INT4_AWQ, false>::set(kernels);
  Kind<Arch, T, NF4_INT4_AWQ, true>::set(kernels);
  Kind<Arch, T, NF4_INT4_COMPRESSED_TENSORS, false>::set(kernels);
  Kind<Arch, T, NF4_INT4_COMPRESSED_TENSORS, true>::set(kernels);
}

template <class Arch, class Kernels>
Kernels make_kernels() {
  Kernels kernels{};
  set_kernels<Arch, __half>(kernels);
  set_kernels<Arch, __nv_bfloat16>(kernels);
  return kernels;
}

}  // namespace

template <class Arch>
Int4MatmulKernels Int4MatmulKernels::make() {
  return make_kernels<Arch, Int4MatmulKernels>();
}
template <class Arch>
Int4FewKernels Int4FewKernels::make() {
  return make_kernels<Arch, Int4FewKernels>();
}

template Int4MatmulKernels Int4MatmulKernels::make<NF4_FAMILY>();
template Int4FewKernels Int4FewKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
