// What a grouped wgmma kernel gets, and the table of them.
#pragma once

#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul_grouped/args.hpp"
#include "cuda/matmul_grouped/wgmma_configs.hpp"

namespace nf4::cuda {

// Of WgmmaArgsOf, what divides tiles among CTAs counts for nothing: GroupedScheduler does.
struct GroupedWgmmaArgs : WgmmaArgs {
  Groups groups;
  int expert_n_tiles;
};

struct GroupedWgmmaKernel {
  int threads;
  int smem_bytes;
  int x_box_rows;             // of a TMA box of x
  const void *kernels[2][2];  // [dtype - NF4_DTYPE_FP16][x is gathered]
};

struct GroupedWgmmaKernels {
  GroupedWgmmaKernel of[kGroupedWgmmaCount];

  template <class Arch>
  static GroupedWgmmaKernels make();
};

}  // namespace nf4::cuda
