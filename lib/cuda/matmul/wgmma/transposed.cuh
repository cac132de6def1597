// W^T of a weight with a codebook, for the wgmma kernels: the gradient dX = dY W. Columns run along
// the stored rows, each with scales of its own, so scales multiply weights in every configuration.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/codebook.cuh"
#include "cuda/matmul/wgmma/transposed_scale_loader.cuh"
#include "cuda/weight/transposed_layout.cuh"

namespace nf4::cuda {
namespace {

// Like WeightReader; the scales of a step, 16 for a lane, are loaded with its words.
template <class Tile>
class TransposedReader {
 public:
  using Layout = typename Tile::Layout;
  struct Scales {
    int step;
  };

  __device__ __forceinline__ explicit TransposedReader(SharedStorage<Tile> shared)
      : shared_(shared), lane_offset_(Layout::lane_offset(lane_row<Layout>())) {}

  __device__ __forceinline__ void wait() {
    mbarrier_wait_parity(shared_.barrier(kWeightFull, state_.stage), state_.phase);
    if constexpr (kFp16) fp16_ = stage().fp16();
    load_words<0>();
  }

  template <int Step>
  __device__ __forceinline__ void load_words() {
    Layout::template load<Step>(words_, shared_.weight(state_.stage), lane_offset_);
    if constexpr (kFp16) {
      const uint4 *const pairs = stage().pairs(block(), Step, lane_index() % 4);
      pairs_[0] = pairs[0];
      pairs_[1] = pairs[1];
    } else {
      const float2 *const floats = stage().floats(block(), Step, lane_index() % 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) floats_[i] = floats[i * 4];
    }
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
    return {Step};
  }

  template <class Decode>
  __device__ __forceinline__ void decode(uint32_t (&a)[4][4], const Decode &decode,
                                         Scales scales) const {
    if constexpr (!kFp16) {
      Layout::decode(a, words_, [&](uint32_t word, int i) { return decode(word, floats_[i]); });
      return;
    }
    if constexpr (Decode::kFp16Scales)
      if (fp16_)
        return Layout::decode(a, words_, [&](uint32_t word, int i) {
          const uint4 &four = pairs_[i / 4];
          const uint32_t pairs[] = {four.x, four.y, four.z, four.w};
          return decode(word, pairs[i % 4]);
        });
    const float2 *const floats = stage().floats(block(), scales.step, lane_index() % 4);
    Layout::decode(a, words_, [&](uint32_t word, int i) { return decode(word, floats[i * 4]); });
  }

 private:
  __device__ __forceinline__ TransposedScaleStage stage() const {
    return {shared_.scales(state_.stage)};
  }
  static constexpr bool kFp16 = kHasFp16Scales<Tile>;
  static __device__ __forceinline__ int block() { return consumer_thread() / 128; }

  const SharedStorage<Tile> shared_;
  const int lane_offset_;
  WeightPipelineState<Tile> state_;
  typename Layout::Words words_;
  // The scales of a step: in fp16 if kFp16 and if fp16_ says that they are precise enough,
  // otherwise in fp32.
  uint4 pairs_[2];
  bool fp16_;
  float2 floats_[8];
};

template <bool Lora>
struct TransposedKind : CodebookKind<Lora> {
  static constexpr bool kSplitK = false;
  template <int TileN>
  using Layout = TransposedLayout<TileN>;
  template <class Tile>
  using Reader = TransposedReader<Tile>;
  static constexpr ScaleOn scale_on(ScaleOn) { return ScaleOn::kWeights; }
  // The rows of scales that have the bytes of TransposedScaleStage.
  static constexpr int scale_rows(int) { return TransposedScaleStage::kBytes / 8; }

  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void load_scales(const typename Tile::Args &args,
                                                     SharedStorage<Tile> shared, int thread) {
    if (args.matmul.weight.nested_absmax != nullptr)
      load_transposed_scales<NestedScales, Tile, Scheduler>(args, shared, thread);
    else
      load_transposed_scales<FlatScales, Tile, Scheduler>(args, shared, thread);
  }
};

// The gradient: W^T of a weight with a codebook.
struct Transposed {
  static constexpr WgmmaTable kTable = WgmmaTable::kTransposed;
  static constexpr WeightKind kKind = WeightKind::kTransposed;
  static constexpr bool kExpertsAlongK = true;
  static constexpr bool kLora = true;
  static constexpr bool lora_apart(const MatmulConfig &) { return false; }

  template <class T, bool Lora>
  using TileKind = TransposedKind<Lora>;
  template <class T, class>
  using Decode = TransposedDecode<T>;
};

}  // namespace
}  // namespace nf4::cuda
