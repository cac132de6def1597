// Instantiates dequantize's kernels for one GPU family; compiled once for each family.
#include "cuda/dequant/aligned.cuh"
#include "cuda/dequant/kernels.hpp"
#include "cuda/dequant/unaligned.cuh"
#include "nf4/nf4.h"

namespace nf4::cuda {
namespace {

template <class Arch, class T, class Scales, DequantConfig Config>
const void *aligned_kernel() {
  constexpr DequantTiling kTiling = dequant_tiling(Config);
  return (const void *)
      dequant_aligned<Arch, T, Scales, kTiling.threads, kTiling.warp_tile, kTiling.resident>;
}

template <class Arch, class T, class Scales>
void set_kernels(const void *(&of)[kDequantConfigCount]) {
  of[kUnaligned] = (const void *)dequant_unaligned<Arch, T, Scales>;
  of[kWarpTile512] = aligned_kernel<Arch, T, Scales, kWarpTile512>();
  of[kWarpTile1024] = aligned_kernel<Arch, T, Scales, kWarpTile1024>();
}

template <class Arch, class T>
void set_kernels(const void *(&of)[kScaleKindCount][kDequantConfigCount]) {
  set_kernels<Arch, T, FlatScales>(of[kFlatScales]);
  set_kernels<Arch, T, NestedScales>(of[kNestedScales]);
  set_kernels<Arch, T, ByteScales>(of[kByteScales]);
}

}  // namespace

template <class Arch>
DequantKernels DequantKernels::make() {
  DequantKernels kernels{};
  set_kernels<Arch, float>(kernels.of[NF4_DTYPE_FP32 - 1]);
  set_kernels<Arch, __half>(kernels.of[NF4_DTYPE_FP16 - 1]);
  set_kernels<Arch, __nv_bfloat16>(kernels.of[NF4_DTYPE_BF16 - 1]);
  return kernels;
}

template DequantKernels DequantKernels::make<NF4_FAMILY>();

}  // namespace nf4::cuda
