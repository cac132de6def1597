// The compile matrix of what permutes columns.
#pragma once

namespace nf4::cuda {

// Of one GPU family (runtime/families.hpp).
struct PermuteKernels {
  const void *sort;       // SortColumnsArgs
  const void *codes;      // PermuteCodesArgs
  const void *x;          // PermuteXArgs
  const void *x_rows[2];  // [index of kPermuteStages]

  template <class Arch>
  static PermuteKernels make();
};

}  // namespace nf4::cuda
