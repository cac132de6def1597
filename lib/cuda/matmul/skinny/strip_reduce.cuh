// The end of a strip kernel: adds the sums of its warps and of its cluster's CTAs, in a fixed
// order.
#pragma once

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/matmul/skinny/mainloop.cuh"
#include "cuda/matmul/skinny/strip_args.hpp"
#include "cuda/ptx/cluster.cuh"

namespace nf4::cuda {
namespace {

constexpr int kRowTiles = 4;  // per warp

// The number of outputs of a row of x. With a codebook weight the product is the gradient.
__device__ __forceinline__ int64_t strip_outputs(const Int4MatmulArgs &matmul) {
  return matmul.weight.rows;
}
__device__ __forceinline__ int64_t strip_outputs(const MatmulArgs &matmul) {
  return matmul.weight.cols;
}

__device__ __forceinline__ float4 add_float4(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Stores row `row`, which is `n` in the strip, for rows m to m + 3 of x.
template <class T, class Matmul>
__device__ __forceinline__ void store_outputs(const Matmul &matmul, int64_t row, int m,
                                              float4 sum) {
  if (row >= strip_outputs(matmul)) return;
  const float bias =
      matmul.bias == nullptr ? 0.0f : to_float(static_cast<const T *>(matmul.bias)[row]);
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  T *const y = static_cast<T *>(matmul.y) + row;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (m + i < matmul.m) y[(m + i) * matmul.y_stride] = from_float<T>(sums[i] + bias);
}

// Adds up the sums of the CTA's pipelines, then of the cluster's CTAs, and stores the outputs.
// Lanes have neighbouring outputs of a row of x or, with kQuadsFirst, neighbouring sums, which is
// faster from 9 rows on.
template <class T, int kWarpsN, int MTiles, bool kQuadsFirst = false, class Args>
__device__ __forceinline__ void reduce_strip(const Args &args, uint8_t *shared, int first_row,
                                             int n_warp, int k_warp,
                                             const float (&total)[kRowTiles][MTiles][4]) {
  constexpr int kMaxM = 8 * MTiles, kQuads = kMaxM / 4, kRows = kStripRows<kWarpsN>;
  constexpr StripSmem kSmem = kStripSmem<kWarpsN, kMaxM>;
  static_assert(kStripWarpsK<kWarpsN> * kSmem.partials_of * 4 <= kSmem.barriers);
  const FragmentLane lane;
  const int rows_of_x = static_cast<int>(args.matmul.m);
  float *const partials = reinterpret_cast<float *>(shared);
  __syncthreads();  // all stages have been read
  // Every 8 rows begin 8 floats further, to avoid bank conflicts.
  const auto at = [](int n, int m) { return n * kMaxM + n / 8 * 8 + m; };
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
    const int column = m * 8 + lane.thread_in_group * 2;
    if (column >= rows_of_x) continue;
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i)
      *reinterpret_cast<float2 *>(partials + k_warp * kSmem.partials_of +
                                  at(n_warp * kStripWarpRows + lane.group_id * 8 + i, column)) =
          float2{total[i / 2][m][i % 2 * 2], total[i / 2][m][i % 2 * 2 + 1]};
  }
  __syncthreads();
  const uint32_t rank = args.cluster > 1 ? cluster_rank() : 0;
  float4 *const received = reinterpret_cast<float4 *>(shared + kSmem.received);
#pragma unroll
  for (int i = 0; i < kRows * kQuads; i += kStripThreads) {
    const int n = kQuadsFirst ? (i + threadIdx.x) / kQuads : (i + threadIdx.x) % kRows;
    const int quad = kQuadsFirst ? (i + threadIdx.x) % kQuads : (i + threadIdx.x) / kRows;
    if (quad * 4 >= rows_of_x || quad >= kQuads) continue;
    float4 sum = *reinterpret_cast<const float4 *>(partials + at(n, quad * 4));
#pragma unroll
    for (int k = 1; k < kStripWarpsK<kWarpsN>; ++k)
      sum = add_float4(sum, *reinterpret_cast<const float4 *>(partials + k * kSmem.partials_of +
                                                              at(n, quad * 4)));
    if (args.cluster == 1) {
      store_outputs<T>(args.matmul, first_row + n, quad * 4, sum);
    } else {
      const int owner = n / args.cluster_rows;
      const int to = (rank * args.cluster_rows + n - owner * args.cluster_rows) * kQuads + quad;
      store_shared_cluster(map_shared_rank(received + to, owner), sum);
    }
  }
  if (args.cluster == 1) return;
  cluster_sync();
#pragma unroll 1
  for (int i = threadIdx.x; i < args.cluster_rows * kQuads; i += kStripThreads) {
    const int local = kQuadsFirst ? i / kQuads : i % args.cluster_rows;
    const int quad = kQuadsFirst ? i % kQuads : i / args.cluster_rows;
    const int n = rank * args.cluster_rows + local;
    if (quad * 4 >= rows_of_x || n >= kRows) continue;
    float4 sum{};
#pragma unroll 1
    for (int from = 0; from < args.cluster; ++from)
      sum = add_float4(sum, received[(from * args.cluster_rows + local) * kQuads + quad]);
    store_outputs<T>(args.matmul, first_row + n, quad * 4, sum);
  }
}

}  // namespace
}  // namespace nf4::cuda
