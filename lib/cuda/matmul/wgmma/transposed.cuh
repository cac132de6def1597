// W^T of a weight with a codebook, for the wgmma kernels: the gradient dX = dY W. Columns run along
// the stored rows, each with scales of its own, so scales multiply weights in every configuration.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/codebook.cuh"
#include "cuda/matmul/wgmma/transposed_scale_loader.cuh"
#include "cuda/weight/transposed_layout.cuh"

namespace nf4::cuda {
namespace {

// As WeightReader; the scales of a step, 16 for a lane, are loaded with its words.
template <class Tile>
class TransposedReader {
 public:
  using Layout = typename Tile::Layout;
  struct Scales {};

  __device__ __forceinline__ explicit TransposedReader(SharedStorage<Tile> shared)
      : shared_(shared), lane_offset_(Layout::lane_offset(lane_row<Layout>())) {}

  __device__ __forceinline__ void wait() {
    mbarrier_wait_parity(shared_.barrier(kWeightFull, state_.stage), state_.phase);
    load_words<0>();
  }

  template <int Step>
  __device__ __forceinline__ void load_words() {
    Layout::template load<Step>(words_, shared_.weight(state_.stage), lane_offset_);
    const float *const scales = shared_.scales(state_.stage) + consumer_thread() / 128 * kTileK +
                                Step * kStepK + lane_index() % 4 * 4;
#pragma unroll
    for (int i = 0; i < kStepK / 16; ++i)
      scales_[i] = *reinterpret_cast<const float4 *>(scales + i * 16);
  }

  __device__ __forceinline__ void release() {
    mbarrier_arrive_warp(shared_.barrier(kWeightEmpty, state_.stage));
    state_.advance();
  }

  __device__ __forceinline__ uint64_t wait_lora() const {
    return lora_descriptor(shared_, state_.stage, state_.phase);
  }

  template <int Step>
  __device__ __forceinline__ Scales scales() const {
    return {};
  }

  template <class Decode>
  __device__ __forceinline__ void decode(uint32_t (&a)[4][4], const Decode &decode, Scales) const {
    Layout::decode(a, words_, scales_, decode);
  }

 private:
  const SharedStorage<Tile> shared_;
  const int lane_offset_;
  WeightPipelineState<Tile> state_;
  typename Layout::Words words_;
  float4 scales_[kStepK / 16];
};

struct TransposedKind : CodebookKind<true> {
  template <int TileN>
  using Layout = TransposedLayout<TileN>;
  template <class Tile>
  using Reader = TransposedReader<Tile>;
  static constexpr ScaleOn scale_on(ScaleOn) { return ScaleOn::kWeights; }

  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void load_scales(const Args &args, SharedStorage<Tile> shared,
                                                     int thread) {
    if (args.matmul.weight.nested_absmax != nullptr)
      load_transposed_scales<NestedScales, Tile, Scheduler>(args, shared, thread);
    else
      load_transposed_scales<FlatScales, Tile, Scheduler>(args, shared, thread);
  }
};

}  // namespace
}  // namespace nf4::cuda
