// The pipeline of a strip kernel, which loads K-tiles of the weight and of x into shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/matmul/skinny/strip_args.hpp"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace nf4::cuda {
namespace {

// A stage of x: rows of 128 bytes in the 128-byte swizzle.
constexpr int kXRowBytes = kStripK * 2;

// The K-tiles of Layout::kWarpsN warps. Lanes of the first warp copy. kWriters is the number of
// warps that also write data of a K-tile to shared memory.
template <class Args, class Layout, int kMaxM, int kWriters = 0>
class StripPipeline {
  static constexpr StripSmem kSmem = kStripSmem<Layout::kWarpsN, kMaxM>;

 public:
  __device__ __forceinline__ StripPipeline(const Args &args, uint8_t *shared, int k_warp,
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
        mbarrier_init(full_ + i, 1 + kWriters * kWarpArrivals);
        mbarrier_init(full_ + kSmem.stages + i, Layout::kWarpsN * kWarpArrivals);
      }
      fence_mbarrier_init();
    }
    __syncwarp();
  }

  // Called by the lanes of the producer's warp.
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
  // Fills stages: all of them, or those from `first` up to `last`.
  __device__ __forceinline__ void start(int first = 0, int last = kSmem.stages) const {
    if (!producer_) return;
#pragma unroll 1
    for (int i = first; i < min(last, k_tiles_); ++i) load(i, i);
  }

  // The stage of the K-tile after the one for which wait() is called.
  __device__ __forceinline__ int next_stage() const {
    return stage_ == kSmem.stages - 1 ? 0 : stage_ + 1;
  }
  // Each writer calls it once it has written its data of a K-tile to a stage.
  __device__ __forceinline__ void written(int stage) const { mbarrier_arrive_warp(full_ + stage); }

  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ const uint8_t *wait() const {
    mbarrier_wait_parity(full_ + stage_, phase_);
    return stages_ + stage_ * kSmem.stage_bytes;
  }

  // Called after the `index`-th K-tile was read. Its stage is loaded again. If other warps read it
  // too, the stage of its predecessor is loaded instead, which all of them have read by now.
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

  const Args &args_;
  uint8_t *const stages_;
  uint64_t *const full_;  // followed by the barriers that say that a stage was read
  const int first_row_, first_k_tile_, k_tiles_;
  const bool producer_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace
}  // namespace nf4::cuda
