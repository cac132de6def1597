// y = x W^T for up to 16 rows of x and an integer weight whose neighbouring words are neighbours
// along N (AWQ, GPTQ), on GPUs with TMA: a skinny GEMM with mma.sync, split along K.
//
// A CTA has a strip of 64 to 256 rows of the weight. If there are few strips, a cluster shares the
// columns and adds up its sums through distributed shared memory, in a fixed order. Warps that are
// side by side share the stages of a pipeline, which also load x. docs/design/matmul-skinny.md has
// the experiments.
#pragma once

#include <cuda_runtime.h>

#include "core/int4.hpp"
#include "cuda/element.cuh"
#include "cuda/matmul/skinny/strip_layout.cuh"
#include "cuda/matmul/skinny/strip_pipeline.cuh"
#include "cuda/matmul/skinny/strip_reduce.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

// The scales and stored zero points of a lane's eight rows, in a group of columns. Nothing waits
// for them before the group ends.
struct StripScales {
  uint4 scales;
  uint32_t zeros;

  __device__ __forceinline__ StripScales(const Int4View &weight, int row, int group) {
    if (row >= weight.rows) row = 0;
    const int64_t index = int64_t{group} * weight.rows + row;
    scales = *reinterpret_cast<const uint4 *>(weight.scales + index);
    zeros = weight.zeros != nullptr ? weight.zeros[index / 8] : kInt4SymmetricZeros;
  }
};

// Adds the sums of a group, times its scales, to `total`, and clears them.
template <class T, class Layout, int MTiles>
__device__ __forceinline__ void finish_group(const Int4View &weight, const StripScales &found,
                                             StripSums<MTiles> &sums,
                                             float (&total)[kRowTiles][MTiles][4]) {
  const uint32_t scales[4] = {found.scales.x, found.scales.y, found.scales.z, found.scales.w};
  const uint32_t word = int4_zero_word(found.zeros, weight.zero_offset);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const uint32_t zeros = zero_points(Layout::zeros(word, i));
    const float offset[2] = {Int4Pairs<T>::minus_low(zeros), Int4Pairs<T>::minus_high(zeros)};
    const float scale[2] = {scale_to_float(weight.fp16_scales, scales[i] & 0xffffu),
                            scale_to_float(weight.fp16_scales, scales[i] >> 16)};
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        total[i][m][k] =
            __fmaf_rn(scale[k / 2], __fmaf_rn(offset[k / 2], sums.x[m][k % 2], sums.d[i][m][k]),
                      total[i][m][k]);
  }
  sums = StripSums<MTiles>();
}

// group_size is a multiple of kStripK, and rows are a multiple of kInt4Unit; the weight, the scales
// and rows of x are 16-byte aligned.
template <class Arch, class T, class Layout, int MTiles>
__global__ void __launch_bounds__(kStripThreads, 1)
    int4_matmul_strip(const __grid_constant__ StripArgs args) {
  constexpr int kWarpsK = kStripWarpsK<Layout::kWarpsN>;
  constexpr int kWeightBytes = kStripSmem<Layout::kWarpsN, 8 * MTiles>.weight_bytes;
  extern __shared__ __align__(1024) uint8_t shared[];
  const Int4View &weight = args.matmul.weight;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int n_warp = warp % Layout::kWarpsN, k_warp = warp / Layout::kWarpsN;
  const int strip = static_cast<int>(blockIdx.x) / args.cluster;
  const int first_row = strip * kStripRows<Layout::kWarpsN>;
  const int part = (static_cast<int>(blockIdx.x) - strip * args.cluster) * kWarpsK + k_warp;
  const int parts = args.cluster * kWarpsK;
  const int begin = part * args.k_tiles / parts, end = (part + 1) * args.k_tiles / parts;
  StripPipeline<StripArgs, Layout, 8 * MTiles> pipeline(args, shared, k_warp, first_row, begin,
                                                        end - begin, n_warp == 0);
  pipeline.prefetch();
  pipeline.init();
  pdl_wait<Arch>();
  pipeline.start();
  pdl_launch_dependents<Arch>();
  if (args.cluster > 1)
    cluster_sync_relaxed();  // all of them have started; this is also a barrier of the CTA
  else
    __syncthreads();

  const typename Layout::Lane lane(n_warp);
  const int row = first_row + n_warp * kStripWarpRows + FragmentLane().group_id * 8;
  const int group_tiles = static_cast<int>(weight.group_size) / kStripK;
  StripSums<MTiles> sums;
  float total[kRowTiles][MTiles][4] = {};
#pragma unroll 1
  for (int k_tile = begin; k_tile < end;) {
    const int group = k_tile / group_tiles;
    const int group_end = min(end, (group + 1) * group_tiles);
    const StripScales scales(weight, row, group);
#pragma unroll 1
    for (; k_tile < group_end; ++k_tile) {
      const uint8_t *const stage = pipeline.wait();
      Layout::template add<T>(lane, stage, stage + kWeightBytes, sums);
      pipeline.release(k_tile - begin);
    }
    finish_group<T, Layout>(weight, scales, sums, total);
  }
#pragma unroll
  for (auto &row_tile : total)
#pragma unroll
    for (auto &tile : row_tile)
#pragma unroll
      for (float &sum : tile) sum = multiply_rn(Int4Pairs<T>::kUnit, sum);
  reduce_strip<T, Layout::kWarpsN>(args, shared, first_row, n_warp, k_warp, total);
}

}  // namespace
}  // namespace nf4::cuda
