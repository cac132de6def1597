// The shared memory through which the warps of a CTA work on its tiles.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/tile.hpp"

namespace nf4::cuda {
namespace {

constexpr int kScaleThreads = 64;  // the threads that load scales

enum Barrier { kXFull, kXEmpty, kWeightFull, kWeightEmpty, kBarrierKinds };

template <class Tile>
struct SharedStorage {
  using Smem = SharedLayout<Tile>;
  uint8_t *base;  // the LUT

  __device__ __forceinline__ uint8_t *x(int stage) const {
    return base + Smem::kX + stage * Smem::kXStageBytes;
  }
  __device__ __forceinline__ uint8_t *weight(int stage) const {
    return base + Smem::kWeight + stage * Smem::kWeightStageBytes;
  }
  // For each row, the scales of a K-tile's two steps, at the place that Kind::scale_index gives.
  __device__ __forceinline__ typename Tile::Scale *scales(int stage) const {
    return reinterpret_cast<typename Tile::Scale *>(base + Smem::kScales +
                                                    stage * Smem::kScaleStageBytes);
  }
  __device__ __forceinline__ uint8_t *subtile(int warp) const {
    return base + Smem::kSubtiles + warp * Smem::kSubtileBytes;
  }
  __device__ __forceinline__ float *scale_code() const {
    return reinterpret_cast<float *>(base + Smem::kScaleCode);
  }
  __device__ __forceinline__ uint64_t *barrier(Barrier kind, int stage) const {
    return reinterpret_cast<uint64_t *>(base + Smem::kBarriers) + kind * kMaxStages + stage;
  }
  // It has one phase, which completes when the first scales are stored.
  __device__ __forceinline__ uint64_t *first_scales() const { return barrier(kBarrierKinds, 0); }
  // It has one phase, which completes when a part of the cluster's partial sums has arrived.
  __device__ __forceinline__ uint64_t *partials(int part) const {
    return barrier(kBarrierKinds, 1 + part);
  }
};

// The place of a warp in a pipeline.
template <int Stages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;  // parity of the phase in which the stage is filled
  __device__ __forceinline__ void advance() {
    if (++stage < Stages) return;
    stage = 0;
    phase ^= 1;
  }
};
template <class Tile>
using XPipelineState = PipelineState<SharedLayout<Tile>::kXStages>;
template <class Tile>
using WeightPipelineState = PipelineState<SharedLayout<Tile>::kWeightStages>;

}  // namespace
}  // namespace nf4::cuda
