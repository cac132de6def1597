// The compile matrix of an adapter's product with x.
#pragma once

namespace nf4::cuda {

// The kernels of one GPU family (runtime/families.hpp). args: LoraProductArgs.
struct LoraKernels {
  // [dtype - NF4_DTYPE_FP16][A is fp32][gradient][32 rows of x, else 16][64 ranks, else 16]. NULL
  // without tensor cores.
  const void *product[2][2][2][2][2];
  const void *any[3];  // [dtype - NF4_DTYPE_FP32]

  template <class Arch>
  static LoraKernels make();
};

}  // namespace nf4::cuda
