// The compile matrix of quantize.
#pragma once

namespace nf4::cuda {

// The kernels of one GPU family (runtime/families.hpp).
struct QuantizeKernels {
  const void *weights[3][2];  // [dtype - 1][caller's codebook]; args: QuantizeArgs
  const void *sums;           // SumArgs
  const void *scales;         // QuantizeScalesArgs
  const void *e2m1[3];        // [dtype - 1]; E2m1QuantizeArgs

  template <class Arch>
  static QuantizeKernels make();
};

}  // namespace nf4::cuda
