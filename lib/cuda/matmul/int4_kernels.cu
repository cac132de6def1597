// Instantiates the mma and skinny kernels of integer weights for one GPU family; compiled once for
// each family.
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
    kernels.mma[kDtype][kLayout][kByColumn] = (const void *)matmul_mma<Arch, T, Source>;
    if constexpr (Arch::kTensorCores)
      kernels.few[kDtype][kLayout][kByColumn] = (const void *)matmul_mma_few<Arch, T, Source>;
    if constexpr (!kByColumn && Arch::kTensorCores) {
      set_skinny<kSkinny2>(kernels);
      set_skinny<kSkinny8>(kernels);
      set_skinny<kSkinny16>(kernels);
    }
  }
  template <int kWarpsN, int kMTiles>
  static const void *strip() {
    using Strip = std::conditional_t<Layout == NF4_INT4_AWQ, StripAwq<kWarpsN>, StripGptq<kWarpsN>>;
    return (const void *)int4_matmul_strip<Arch, T, Strip, kMTiles>;
  }
  template <int Config>
  static void set_skinny(Int4MatmulKernels &kernels) {
    constexpr int kMTiles = Config == kSkinny16 ? 2 : 1;
    constexpr int kIndex = Config - kFirstSkinny;
    const void *&kernel = kernels.skinny.one[kDtype][kLayout][kIndex];
    if constexpr (takes_strips(Layout, kMatmulConfigs[Config].tile_m, Arch::kTensorMaps)) {
      if constexpr (Arch::kTensorMaps && Config != kSkinny2) {
        kernel = strip<narrow_strip(Layout), kMTiles>();
        kernels.skinny.wide[kDtype][kLayout][kIndex] = strip<wide_strip(Layout), kMTiles>();
      }
    } else {
      using Skinny = std::conditional_t<Layout == NF4_INT4_GPTQ, SkinnyGptq, SkinnyRowPacked>;
      using WarpMma = std::conditional_t<Config == kSkinny2, Int4MmaM2<T, Skinny>,
                                         Int4MmaM8<T, Skinny, kMTiles>>;
      kernel = (const void *)int4_matmul_skinny<Arch, T, Skinny, WarpMma>;
    }
  }
};

template <class Arch, class T>
void set_kernels(Int4MatmulKernels &kernels) {
  Kind<Arch, T, NF4_INT4_GPTQ, false>::set(kernels);
  Kind<Arch, T, NF4_INT4_GPTQ, true>::set(kernels);
  Kind<Arch, T, NF4_INT4_AWQ, false>::set(kernels);
  Kind<Arch, T, NF4_INT4_AWQ, true>::set(kernels);
  Kind<Arch, T, NF4_INT4_COMPRESSED_TENSORS, false>::set(kernels);
  Kind<Arch, T, NF4_INT4_COMPRESSED_TENSORS, true>::set(kernels);
}

}  // namespace

template <class Arch>
Int4MatmulKernels Int4MatmulKernels::make() {
  Int4MatmulKernels kernels{};
  set_kernels<Arch, __half>(kernels);
  set_kernels<Arch, __nv_bfloat16>(kernels);
  return kernels;
}

template Int4MatmulKernels Int4MatmulKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
