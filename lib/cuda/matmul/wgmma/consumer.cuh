// The data that a consumer warp reads from the pipelines: the weight and its scales by K-tiles, x
// by steps.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/shared.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace nf4::cuda {
namespace {

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % 32); }
// The index of the thread among the consumers.
__device__ __forceinline__ int consumer_thread() { return static_cast<int>(threadIdx.x) - 128; }
// The first of this lane's two rows of the tile, which are Layout::kRowDistance apart.
template <class Layout>
__device__ __forceinline__ int lane_row() {
  return consumer_thread() / 32 * 16 + Layout::lane_row(lane_index());
}

// Waits for a stage with ranks of an adapter's B; returns the wgmma descriptor of this warpgroup's
// rows.
template <class Tile>
__device__ __forceinline__ uint64_t lora_descriptor(SharedStorage<Tile> shared, int stage,
                                                    uint32_t phase) {
  mbarrier_wait_parity(shared.barrier(kWeightFull, stage), phase);
  return wgmma_descriptor_64(shared.weight(stage) + consumer_thread() / 128 * 64 * kLoraTileK * 2);
}

template <class Tile>
class WeightReader {
 public:
  using Layout = typename Tile::Layout;
  // The scales of this lane's rows.
  struct Scales {
    typename Tile::Scale of[2];
  };

  __device__ __forceinline__ explicit WeightReader(SharedStorage<Tile> shared)
      : shared_(shared), lane_offset_(Layout::lane_offset(lane_row<Layout>())) {}

  // Waits for the next K-tile and starts to load the words of its first step.
  __device__ __forceinline__ void wait() {
    mbarrier_wait_parity(shared_.barrier(kWeightFull, state_.stage), state_.phase);
    load_words<0>();
  }

  __device__ __forceinline__ uint64_t wait_lora() const {
    return lora_descriptor(shared_, state_.stage, state_.phase);
  }

  template <int Step>
  __device__ __forceinline__ void load_words() {
    Layout::template load<Step>(words_, shared_.weight(state_.stage), lane_offset_);
  }

  // Releases the stage, once the whole warp has its scales and words.
  __device__ __forceinline__ void release() {
    mbarrier_arrive_warp(shared_.barrier(kWeightEmpty, state_.stage));
    state_.advance();
  }

  // The scales of a step.
  template <int Step>
  __device__ __forceinline__ Scales scales() const {
    using Kind = typename Tile::Kind;
    const auto *const scales = shared_.scales(state_.stage) +
                               Kind::template scale_index<Tile>(Layout::row_of(lane_offset_)) +
                               Step;
    return {scales[0], scales[Kind::template kScaleDistance<Tile>]};
  }

  // The A operands of the step whose words were loaded last.
  template <class Decode>
  __device__ __forceinline__ void decode(uint32_t (&a)[4][4], Decode decode,
                                         const Scales &scales) const {
    Layout::decode(a, words_,
                   [&](auto code, int half) { return decode(code, half, scales.of[half]); });
  }

 private:
  const SharedStorage<Tile> shared_;
  const int lane_offset_;
  WeightPipelineState<Tile> state_;
  typename Layout::Words words_;
};

template <class Tile>
class XReader {
 public:
  __device__ __forceinline__ explicit XReader(SharedStorage<Tile> shared) : shared_(shared) {}

  // Waits for the next step; returns its wgmma descriptor.
  __device__ __forceinline__ uint64_t wait() {
    mbarrier_wait_parity(shared_.barrier(kXFull, state_.stage), state_.phase);
    return wgmma_descriptor(shared_.x(state_.stage));
  }
  // Called when the wgmmas that read the stage are complete.
  __device__ __forceinline__ void release() {
    release(state_.stage);
    state_.advance();
  }
  // Called when the wgmmas that read the stage are in flight, and those of the previous step are
  // complete.
  __device__ __forceinline__ void hold() {
    release_held();
    held_ = state_.stage;
    state_.advance();
  }
  __device__ __forceinline__ void release_held() {
    if (held_ != kNone) release(held_);
    held_ = kNone;
  }

 private:
  static constexpr int kNone = -1;

  __device__ __forceinline__ void release(int stage) const {
    mbarrier_arrive_warp(shared_.barrier(kXEmpty, stage));
  }

  const SharedStorage<Tile> shared_;
  XPipelineState<Tile> state_;
  int held_ = kNone;  // the stage that wgmmas in flight read
};

}  // namespace
}  // namespace nf4::cuda
