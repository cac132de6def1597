// All matmul kernels of an architecture.
#pragma once

#include "cuda/matmul/few.cuh"
#include "cuda/matmul/tiled.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, bool Nested>
void set_matmul_kernels(const void *(&kernels)[kFamilyShapes]) {
  kernels[kTiled] = (const void *)matmul_tiled<Arch, T, Nested>;
  if constexpr (Arch::kTensorCores) {
    kernels[kFew2] = (const void *)matmul_few<Arch, T, Nested, OwnQuarters<T>>;
    kernels[kFew8] = (const void *)matmul_few<Arch, T, Nested, SharedQuarters<T, 1>>;
    kernels[kFew16] = (const void *)matmul_few<Arch, T, Nested, SharedQuarters<T, 2>>;
  }
}

template <class Arch>
MatmulFamily matmul_family(Family family) {
  MatmulFamily result{family, Arch::kTensorMaps, {}};
  set_matmul_kernels<Arch, __half, false>(result.kernels[0][0]);
  set_matmul_kernels<Arch, __half, true>(result.kernels[0][1]);
  set_matmul_kernels<Arch, __nv_bfloat16, false>(result.kernels[1][0]);
  set_matmul_kernels<Arch, __nv_bfloat16, true>(result.kernels[1][1]);
  return result;
}

}  // namespace
}  // namespace nf4::cuda
