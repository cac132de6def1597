// What a grouped wgmma kernel gets, and the table of them.
#pragma once

#include <cuda_runtime.h>

#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul_grouped/args.hpp"
#include "cuda/matmul_grouped/wgmma_configs.hpp"

namespace nf4::cuda {

// Of WgmmaArgsOf, what divides tiles among CTAs counts for nothing: GroupedScheduler does.
struct GroupedWgmmaArgs : WgmmaArgs {
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

struct GroupedWgmmaKernel {
  int threads;
  int smem_bytes;
  int x_box_rows;          // of a TMA box of x
  const void *kernels[2];  // fp16, bf16: GroupedWgmmaArgs
};

struct GroupedWgmmaKernels {
  GroupedWgmmaKernel of[kGroupedWgmmaCount];
  const void *gather;  // args: GatherArgs

  template <class Arch>
  static GroupedWgmmaKernels make();
};

}  // namespace nf4::cuda
