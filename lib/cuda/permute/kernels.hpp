// The compile matrix of the kernels that permute columns.
#pragma once

namespace nf4::cuda {

// The kernels of one GPU family (runtime/families.hpp).
struct PermuteKernels {
  const void *sort;       // SortColumnsArgs
  const void *codes;      // PermuteCodesArgs
  const void *x;          // PermuteXArgs
  const void *x_rows[2];  // [index of kPermuteStages]

  template <class Arch>
  static PermuteKernels make();
};

}  // namespace nf4::cuda
