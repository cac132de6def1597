// The arguments of a grouped wgmma kernel, and of the kernel that gathers x for it.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul/wgmma/launch.hpp"
#include "cuda/matmul_grouped/args.hpp"

namespace nf4::cuda {

// GroupedScheduler divides the tiles among the CTAs; the fields of WgmmaArgsOf for that are unused.
// The weight is the stack of all experts if they lie along N, else one of them (stack.hpp).
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

// For all kinds of weight.
struct GatherKernels {
  const void *gather;  // args: GatherArgs

  template <class Arch>
  static GatherKernels make();
};

}  // namespace nf4::cuda
