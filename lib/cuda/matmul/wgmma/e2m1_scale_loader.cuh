// The two producer warps that load the scale bytes of an MXFP4 or NVFP4 weight and store them by
// K-tiles, as numbers of x's dtype: one for each 16 columns of a row.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul/wgmma/shared.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/weight/e2m1.cuh"

namespace nf4::cuda {
namespace {

// kScaleThreads threads, numbered by `thread`.
template <class T, class Tile>
class E2m1ScaleLoader {
 public:
  __device__ __forceinline__ E2m1ScaleLoader(const typename Tile::Args &args,
                                             SharedStorage<Tile> shared, int thread)
      : args_(args), weight_(args.matmul.weight), shared_(shared), thread_(thread) {}

  // Loads the scales of a work tile, a K-tile ahead.
  __device__ __forceinline__ void load(const WorkTile &work, int64_t n_end) {
    if (first_) begin_loads<typename Tile::Kind>(args_);
    const int step_bytes = kStepK >> weight_.blocksize_log2;
    const int64_t row_bytes = weight_.cols >> weight_.blocksize_log2;
    const uint8_t *rows[kRows];
    uint2 bytes[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Past the last row are copies of it.
      const int64_t row = min(int64_t{work.n} + thread_ + i * kScaleThreads, n_end - 1);
      rows[i] = static_cast<const uint8_t *>(weight_.absmax) + row * row_bytes;
      bytes[i] = fetch(rows[i] + work.k_tile * 2 * step_bytes, work.k_tile);
    }
    for (int k_tile = work.k_tile; k_tile < work.k_tile_end; ++k_tile) {
      uint4 *const to = acquire();
      const int next = min(k_tile + 1, work.k_tile_end - 1);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        uint32_t scales[4];
        spread(bytes[i].x, scales);
        spread(bytes[i].y, scales + 2);
        bytes[i] = fetch(rows[i] + next * 2 * step_bytes, next);
        E2m1<T>::to_scales(weight_.scale_bytes, scales);
        to[thread_ + i * kScaleThreads] = {scales[0], scales[1], scales[2], scales[3]};
      }
      commit();
    }
  }

  // Skips the K-tiles of an adapter, which have no scales.
  __device__ __forceinline__ void pass(int k_tiles) {
    for (; k_tiles > 0; --k_tiles) {
      acquire();
      commit();
    }
  }

 private:
  static constexpr int kRows = Tile::kTileN / kScaleThreads;  // per thread

  __device__ __forceinline__ bool small_blocks() const { return weight_.blocksize_log2 == 4; }

  // Fetches the bytes of two steps. Past the last step they are 0, as another row's might be NaN.
  __device__ __forceinline__ uint2 fetch(const uint8_t *from, int k_tile) const {
    const bool second = (k_tile * 2 + 1) * kStepK < weight_.cols;
    const auto load = [&](auto *steps) -> uint2 { return {steps[0], second ? steps[1] : 0u}; };
    return small_blocks() ? load(reinterpret_cast<const uint32_t *>(from))
                          : load(reinterpret_cast<const uint16_t *>(from));
  }

  // Brings the bytes of a step, two or four, to the halves of words: one for each 16 columns.
  __device__ __forceinline__ void spread(uint32_t bytes, uint32_t *to) const {
    to[0] = __byte_perm(bytes, 0, small_blocks() ? 0x4140 : 0x4040);
    to[1] = __byte_perm(bytes, 0, small_blocks() ? 0x4342 : 0x4141);
  }

  __device__ __forceinline__ uint4 *acquire() const {
    mbarrier_wait_parity(shared_.barrier(kWeightEmpty, state_.stage), state_.phase ^ 1);
    return reinterpret_cast<uint4 *>(shared_.scales(state_.stage));
  }
  __device__ __forceinline__ void commit() {
    mbarrier_arrive_warp(shared_.barrier(kWeightFull, state_.stage));
    if (first_) mbarrier_arrive_warp(shared_.first_scales());
    first_ = false;
    state_.advance();
  }

  const typename Tile::Args &args_;
  const WeightView &weight_;
  const SharedStorage<Tile> shared_;
  const int thread_;
  bool first_ = true;
  WeightPipelineState<Tile> state_;
};

}  // namespace
}  // namespace nf4::cuda
