// What a grouped wgmma kernel gets, and the tables of them.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul_grouped/args.hpp"

namespace nf4::cuda {

// Of WgmmaArgsOf, what divides tiles among CTAs counts for nothing: GroupedScheduler does. The
// weight is the stack of all experts if they lie along N, else one of them (stack.hpp).
template <class Args>
struct GroupedWgmmaArgsOf : Args {
  Groups groups;
  int expert_n_tiles;
};

// Vectors are of 16 bytes.
constexpr int kGatherThreads = 256;
struct GatherArgs {
  Groups groups;
  const uint4 *x;
  int64_t x_rows;
  int64_t x_stride;  // vectors
  uint4 *to;         // [rows][row_vectors]
  int row_vectors;
};

// The args of their kernels are GroupedWgmmaArgsOf those of WgmmaKernels.
struct GroupedWgmmaKernels : WgmmaKernels {
  const void *gather;  // for all kinds of weight; args: GatherArgs

  template <class Arch>
  static GroupedWgmmaKernels make();
};
struct GroupedGradWgmmaKernels : WgmmaKernels {
  template <class Arch>
  static GroupedGradWgmmaKernels make();
};
template <nf4_int4_layout Layout>
struct GroupedInt4WgmmaKernels : WgmmaKernels {
  template <class Arch>
  static GroupedInt4WgmmaKernels make();
};

}  // namespace nf4::cuda
