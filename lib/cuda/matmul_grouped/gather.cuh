// Copies rows of x into the order of the rows of y, for kernels that load x by TMA, which cannot
// gather. A warp has a row at a time. Bound by memory: 60 of 480 us for 4096 tokens of Qwen3's
// experts.
#pragma once

#include "cuda/matmul_grouped/routing.cuh"
#include "cuda/matmul_grouped/wgmma_args.hpp"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

template <class Arch>
__global__ void __launch_bounds__(kGatherThreads)
    gather_rows(const __grid_constant__ GatherArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t warps = int64_t{gridDim.x} * (kGatherThreads / 32);
  for (int64_t row = (int64_t{blockIdx.x} * kGatherThreads + threadIdx.x) / 32;
       row < args.groups.rows; row += warps) {
    const int64_t x_row = x_row_of(args.groups, args.x_rows, static_cast<int>(row));
    const bool exists = x_row < args.x_rows;
    const uint4 *const from = args.x + (exists ? x_row : 0) * args.x_stride;
    uint4 *const to = args.to + row * args.row_vectors;
#pragma unroll 4
    for (int i = lane; i < args.row_vectors; i += 32) to[i] = exists ? from[i] : uint4{};
  }
}

}  // namespace
}  // namespace nf4::cuda
