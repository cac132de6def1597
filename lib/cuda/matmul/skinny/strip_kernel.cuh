// y = x W^T for up to 16 rows of x and an integer weight whose words lie along its rows (AWQ,
// GPTQ): a skinny GEMM by mma.sync, split along K.
//
// A CTA has a strip of 64 to 256 rows of the weight; where strips are few, a cluster shares the
// columns and adds up its sums through distributed shared memory, in a fixed order. The warps side
// by side share the stages of a pipeline, which bring x along. docs/design/matmul-skinny.md has the
// experiments.
#pragma once

#include <cuda_runtime.h>

#include "core/int4.hpp"
#include "cuda/element.cuh"
#include "cuda/matmul/skinny/strip_layout.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

// The K-tiles of Layout::kWarpsN warps on their way to shared memory. Lanes of the first of them
// copy.
template <class Layout, int kMaxM>
class StripPipeline {
  static constexpr StripSmem kSmem = kStripSmem<Layout::kWarpsN, kMaxM>;

 public:
  __device__ __forceinline__ StripPipeline(const StripArgs &args, uint8_t *shared, int k_warp,
                                           int first_row, int first_k_tile, int k_tiles,
                                           bool producer)
      : args_(args),
        stages_(shared + k_warp * kSmem.stages * kSmem.stage_bytes),
        full_(reinterpret_cast<uint64_t *>(shared + kSmem.barriers) + k_warp * 2 * kSmem.stages),
        first_row_(first_row),
        first_k_tile_(first_k_tile),
        k_tiles_(k_tiles),
        producer_(producer) {}

  __device__ __forceinline__ void prefetch() const {
    if (producer_ && k_tiles_ > 0 && threadIdx.x % 32 < Layout::kBoxes)
      Layout::prefetch_box(&args_.packed, first_k_tile_, first_row_, threadIdx.x % 32);
  }

  // A barrier of the CTA must follow.
  __device__ __forceinline__ void init() const {
    if (producer_ && threadIdx.x % 32 == 0) {
#pragma unroll 1
      for (int i = 0; i < kSmem.stages; ++i) {
        mbarrier_init(full_ + i);
        mbarrier_init(full_ + kSmem.stages + i, Layout::kWarpsN * kWarpArrivals);
      }
      fence_mbarrier_init();
    }
    __syncwarp();
  }

  // By the lanes of the producer's warp.
  __device__ __forceinline__ void load(int index, int stage) const {
    uint8_t *const to = stages_ + stage * kSmem.stage_bytes;
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive_expect_tx(full_ + stage, kSmem.stage_bytes);
      tma_load_2d(to + kSmem.weight_bytes, &args_.x, (first_k_tile_ + index) * kXRowBytes, 0,
                  full_ + stage);
    }
    __syncwarp();
    if (threadIdx.x % 32 < Layout::kBoxes)
      Layout::load_box(to, &args_.packed, first_k_tile_ + index, first_row_, threadIdx.x % 32,
                       full_ + stage);
  }
  __device__ __forceinline__ void start() const {
    if (!producer_) return;
#pragma unroll 1
    for (int i = 0; i < min(kSmem.stages, k_tiles_); ++i) load(i, i);
  }

  __device__ __forceinline__ const uint8_t *wait() const {
    mbarrier_wait_parity(full_ + stage_, phase_);
    return stages_ + stage_ * kSmem.stage_bytes;
  }

  // After the `index`-th K-tile was read. Its stage is loaded again, or, if other warps read it
  // too, its predecessor's, which they have read by now.
  __device__ __forceinline__ void release(int index) {
    if constexpr (Layout::kWarpsN == 1) {
      __syncwarp();
      if (index + kSmem.stages < k_tiles_) load(index + kSmem.stages, stage_);
      advance();
      return;
    }
    mbarrier_arrive_warp(full_ + kSmem.stages + stage_);
    if (producer_ && index > 0 && index - 1 + kSmem.stages < k_tiles_) {
      const bool wrapped = stage_ == 0;
      const int stage = wrapped ? kSmem.stages - 1 : stage_ - 1;
      mbarrier_wait_parity(full_ + kSmem.stages + stage, phase_ ^ wrapped);
      load(index - 1 + kSmem.stages, stage);
    }
    advance();
  }

 private:
  __device__ __forceinline__ void advance() {
    stage_ = stage_ == kSmem.stages - 1 ? 0 : stage_ + 1;
    phase_ ^= stage_ == 0;
  }

  const StripArgs &args_;
  uint8_t *const stages_;
  uint64_t *const full_;  // and those that say that a stage was read
  const int first_row_, first_k_tile_, k_tiles_;
  const bool producer_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

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

__device__ __forceinline__ float4 add_float4(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Of row `row`, which is `n` in the strip, rows m to m + 3 of x.
template <class T>
__device__ __forceinline__ void store_outputs(const Int4MatmulArgs &matmul, int64_t row, int m,
                                              float4 sum) {
  if (row >= matmul.weight.rows) return;
  const float bias =
      matmul.bias == nullptr ? 0.0f : to_float(static_cast<const T *>(matmul.bias)[row]);
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  T *const y = static_cast<T *>(matmul.y) + row;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (m + i < matmul.m) y[(m + i) * matmul.y_stride] = from_float<T>(sums[i] + bias);
}

// Adds up the sums of the CTA's pipelines, then of the cluster's CTAs, and stores the outputs.
template <class T, int kWarpsN, int MTiles>
__device__ __forceinline__ void reduce_strip(const StripArgs &args, uint8_t *shared, int first_row,
                                             int n_warp, int k_warp,
                                             const float (&total)[kRowTiles][MTiles][4]) {
  constexpr int kMaxM = 8 * MTiles, kQuads = kMaxM / 4, kRows = kStripRows<kWarpsN>;
  constexpr StripSmem kSmem = kStripSmem<kWarpsN, kMaxM>;
  static_assert(kStripWarpsK<kWarpsN> * kSmem.partials_of * 4 <= kSmem.barriers);
  const FragmentLane lane;
  const int rows_of_x = static_cast<int>(args.matmul.m);
  float *const partials = reinterpret_cast<float *>(shared);
  __syncthreads();  // all stages were read
  // 8 floats further each 8 rows, against bank conflicts.
  const auto at = [](int n, int m) { return n * kMaxM + n / 8 * 8 + m; };
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
    const int column = m * 8 + lane.thread_in_group * 2;
    if (column >= rows_of_x) continue;
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i)
      *reinterpret_cast<float2 *>(partials + k_warp * kSmem.partials_of +
                                  at(n_warp * kStripWarpRows + lane.group_id * 8 + i, column)) =
          float2{multiply_rn(Int4Pairs<T>::kUnit, total[i / 2][m][i % 2 * 2]),
                 multiply_rn(Int4Pairs<T>::kUnit, total[i / 2][m][i % 2 * 2 + 1])};
  }
  __syncthreads();
  const uint32_t rank = args.cluster > 1 ? cluster_rank() : 0;
  float4 *const received = reinterpret_cast<float4 *>(shared + kSmem.received);
#pragma unroll
  for (int i = 0; i < kRows * kQuads; i += kStripThreads) {
    const int n = (i + threadIdx.x) % kRows, quad = (i + threadIdx.x) / kRows;
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
    const int local = i % args.cluster_rows, quad = i / args.cluster_rows;
    const int n = rank * args.cluster_rows + local;
    if (quad * 4 >= rows_of_x || n >= kRows) continue;
    float4 sum{};
#pragma unroll 1
    for (int from = 0; from < args.cluster; ++from)
      sum = add_float4(sum, received[(from * args.cluster_rows + local) * kQuads + quad]);
    store_outputs<T>(args.matmul, first_row + n, quad * 4, sum);
  }
}

// group_size is a multiple of kStripK; rows of kInt4Unit rows; 16-byte aligned weight, scales and
// rows of x.
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
  StripPipeline<Layout, 8 * MTiles> pipeline(args, shared, k_warp, first_row, begin, end - begin,
                                             n_warp == 0);
  pipeline.prefetch();
  pipeline.init();
  pdl_wait<Arch>();
  pipeline.start();
  pdl_launch_dependents<Arch>();
  if (args.cluster > 1)
    cluster_sync_relaxed();  // all of them have started; and a barrier of the CTA
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
  reduce_strip<T, Layout::kWarpsN>(args, shared, first_row, n_warp, k_warp, total);
}

}  // namespace
}  // namespace nf4::cuda
