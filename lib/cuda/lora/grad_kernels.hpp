// The compile matrix of the gradients of an adapter's matrices.
#pragma once

namespace nf4::cuda {

// The kernels of one GPU family (runtime/families.hpp). args: LoraGradArgs.
struct LoraGradKernels {
  // [dtype - NF4_DTYPE_FP16][16-byte vectors of x and dY][index of kLoraGradRanks]. NULL without
  // tensor cores.
  const void *of[2][2][2];
  const void *any[3];  // [dtype - NF4_DTYPE_FP32]

  template <class Arch>
  static LoraGradKernels make();
};

}  // namespace nf4::cuda
