// The tile scheduler of grouped products.
#pragma once

#include "cuda/matmul/wgmma/codebook.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul_grouped/routing.cuh"
#include "cuda/matmul_grouped/wgmma_args.hpp"

namespace nf4::cuda {
namespace {

// Tiles are numbered expert after expert; in one, those that share rows of the weight are
// neighbours. Each CTA takes every gridDim.x-th. Each thread walks over the experts by itself, with
// which it keeps up: single threads load x and the weight, and no memory holds a list of tiles.
template <class Tile>
class GroupedScheduler {
 public:
  using Args = typename Tile::Args;
  static constexpr bool kStreamK = false;
  static constexpr bool kReadsMemory = true;

  __device__ __forceinline__ explicit GroupedScheduler(const Args &args)
      : args_(args), tile_(static_cast<int>(blockIdx.x)) {
    find_expert();
  }

  __device__ __forceinline__ bool is_valid() const { return expert_ < args_.groups.experts; }
  __device__ __forceinline__ WorkTile work_tile() const {
    const int chunks = m_tiles(), n_tile = tile_ / chunks;
    return {expert_ * args_.groups.expert_rows + n_tile * Tile::kTileN,
            first_row_ + (tile_ - n_tile * chunks) * Tile::kTileM,
            0,
            args_.k_tiles,
            true,
            static_cast<int>(blockIdx.x)};
  }
  __device__ __forceinline__ void advance() {
    tile_ += static_cast<int>(gridDim.x);
    find_expert();
  }

  __device__ __forceinline__ int64_t m_end(const WorkTile &) const { return end_row_; }
  __device__ __forceinline__ int64_t n_end(const WorkTile &) const {
    return int64_t{expert_ + 1} * args_.groups.expert_rows;
  }
  __device__ __forceinline__ int64_t y_offset() const {
    return -int64_t{expert_} * args_.groups.expert_rows;
  }
  __device__ __forceinline__ int64_t bias_offset() const {
    return expert_ * args_.groups.bias_stride + y_offset();
  }
  __device__ __forceinline__ float row_scale(int row) const {
    const float *const scales = args_.groups.row_scale;
    return scales == nullptr || row >= end_row_ ? 1.0f : scales[row];
  }

 private:
  __device__ __forceinline__ int m_tiles() const {
    return (end_row_ - first_row_ + Tile::kTileM - 1) / Tile::kTileM;
  }
  // Walks on to the expert that tile_ is of, and counts it from that expert's first tile. Several
  // ends are loaded at once, as each takes long.
  __device__ __forceinline__ void find_expert() {
    constexpr int kEnds = 8;
    const Groups &groups = args_.groups;
    while (true) {
      int ends[kEnds];
#pragma unroll
      for (int i = 0; i < kEnds; ++i)
        ends[i] = groups.ends[min(expert_ + 1 + i, groups.experts - 1)];
#pragma unroll
      for (int i = 0; i < kEnds; ++i) {
        const int tiles = m_tiles() * args_.expert_n_tiles;
        if (tile_ < tiles || !is_valid()) return;
        tile_ -= tiles;
        ++expert_;
        first_row_ = end_row_;
        end_row_ = max(first_row_, min(ends[i], groups.rows));
      }
    }
  }

  const Args &args_;
  int tile_;
  int expert_ = -1;
  int first_row_ = 0, end_row_ = 0;  // of y
};

// A weight with a codebook, in kernels whose tiles are GroupedScheduler's.
struct GroupedKind : CodebookKind<false> {
  using Args = GroupedWgmmaArgs;

  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void load_scales(const Args &args, SharedStorage<Tile> shared,
                                                     int thread) {
    if (args.matmul.weight.nested_absmax != nullptr)
      nf4::cuda::load_scales<NestedScales, Tile, Scheduler>(args, shared, thread);
    else
      nf4::cuda::load_scales<FlatScales, Tile, Scheduler>(args, shared, thread);
  }
};

}  // namespace
}  // namespace nf4::cuda
