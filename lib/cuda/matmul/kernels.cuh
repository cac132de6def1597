// All matmul kernels of an architecture.
#pragma once

#include "cuda/matmul/few.cuh"
#include "cuda/matmul/tiled.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class T, bool Nested, class Quarters>
void set_few_kernels(MatmulFamily &family, int dtype, MatmulShape shape) {
  family.kernels[dtype][Nested][shape] = (const void *)matmul_few<Arch, T, Nested, Quarters>;
  family.batches[dtype][Nested][shape] = (const void *)matmul_few_batch<Arch, T, Nested, Quarters>;
}

template <class Arch, class T, bool Nested>
void set_matmul_kernels(MatmulFamily &family, int dtype) {
  family.kernels[dtype][Nested][kTiled] = (const void *)matmul_tiled<Arch, T, Nested>;
  if constexpr (Arch::kTensorCores) {
    set_few_kernels<Arch, T, Nested, OwnQuarters<T>>(family, dtype, kFew2);
    set_few_kernels<Arch, T, Nested, SharedQuarters<T, 1>>(family, dtype, kFew8);
    set_few_kernels<Arch, T, Nested, SharedQuarters<T, 2>>(family, dtype, kFew16);
  }
}

template <class Arch>
MatmulFamily matmul_family(Family family) {
  MatmulFamily result{family, Arch::kTensorMaps, {}, {}};
  set_matmul_kernels<Arch, __half, false>(result, 0);
  set_matmul_kernels<Arch, __half, true>(result, 0);
  set_matmul_kernels<Arch, __nv_bfloat16, false>(result, 1);
  set_matmul_kernels<Arch, __nv_bfloat16, true>(result, 1);
  return result;
}

}  // namespace
}  // namespace nf4::cuda
