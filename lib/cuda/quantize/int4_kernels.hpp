// The compile matrix of quantize to integer weights.
#pragma once

namespace nf4::cuda {

// The kernels of one GPU family (runtime/families.hpp).
struct Int4QuantizeKernels {
  const void *of[3];  // [dtype - 1]; args: Int4QuantizeArgs

  template <class Arch>
  static Int4QuantizeKernels make();
};

}  // namespace nf4::cuda
