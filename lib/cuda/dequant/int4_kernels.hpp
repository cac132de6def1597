// The compile matrix of dequantize of integer weights.
#pragma once

namespace nf4::cuda {

// The kernels of one GPU family (runtime/families.hpp). args: Int4DequantArgs
struct Int4DequantKernels {
  const void *aligned[3][3];  // [dtype - 1][layout - 1]
  const void *any[3];         // [dtype - 1]

  template <class Arch>
  static Int4DequantKernels make();
};

}  // namespace nf4::cuda
