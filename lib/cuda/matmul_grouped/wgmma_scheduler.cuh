// The tile scheduler of the grouped wgmma kernels.
#pragma once

#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul_grouped/routing.cuh"
#include "cuda/matmul_grouped/wgmma_args.hpp"

namespace nf4::cuda {
namespace {

// Tiles are numbered expert after expert; within an expert, tiles that share rows of the weight are
// neighbours. An expert's rows of x are divided evenly among the fewest tiles that have room for
// them. Each CTA has every gridDim.x-th tile. Each thread walks over the experts by itself, which
// is fast enough: single threads load x and the weight, and no memory holds a list of tiles.
template <class Tile, bool AlongK = false>
class GroupedScheduler {
 public:
  using Args = typename Tile::Args;
  static constexpr bool kStreamK = false;
  static constexpr bool kReadsMemory = true;
  static constexpr bool kAlongK = AlongK;  // see stacked_along_k()

  __device__ __forceinline__ explicit GroupedScheduler(const Args &args)
      : args_(args), tile_(static_cast<int>(blockIdx.x)) {
    find_expert();
  }

  __device__ __forceinline__ bool is_valid() const { return expert_ < args_.groups.experts; }
  __device__ __forceinline__ WorkTile work_tile() const {
    const int chunks = m_tiles(), n_tile = tile_ / chunks;
    return {static_cast<int>(first_weight_row()) + n_tile * Tile::kTileN,
            first_row_ + (tile_ - n_tile * chunks) * chunk_rows(),
            0,
            args_.k_tiles,
            true,
            static_cast<int>(blockIdx.x)};
  }
  __device__ __forceinline__ void advance() {
    tile_ += static_cast<int>(gridDim.x);
    find_expert();
  }

  __device__ __forceinline__ int64_t m_end(const WorkTile &work) const {
    return min(work.m + chunk_rows(), end_row_);
  }
  // The rows of x.
  __device__ __forceinline__ int rows() const { return min(chunk_rows(), end_row_ - first_row_); }
  __device__ __forceinline__ int64_t n_end(const WorkTile &) const {
    return first_weight_row() + expert_rows();
  }
  __device__ __forceinline__ int64_t y_offset() const { return -first_weight_row(); }
  __device__ __forceinline__ int64_t bias_offset() const {
    return expert_ * args_.groups.bias_stride + y_offset();
  }
  __device__ __forceinline__ float row_scale(int row) const {
    const float *const scales = args_.groups.row_scale;
    return scales == nullptr || row >= end_row_ ? 1.0f : scales[row];
  }
  __device__ __forceinline__ int expert_along_k() const { return kAlongK ? expert_ : 0; }
  __device__ __forceinline__ int first_column() const {
    return expert_along_k() * static_cast<int>(args_.matmul.weight.cols);
  }

 private:
  __device__ __forceinline__ int64_t first_weight_row() const {
    return kAlongK ? 0 : int64_t{expert_} * expert_rows();
  }
  __device__ __forceinline__ int expert_rows() const {
    return static_cast<int>(args_.groups.expert_rows);
  }
  __device__ __forceinline__ int m_tiles() const {
    return (end_row_ - first_row_ + Tile::kTileM - 1) / Tile::kTileM;
  }
  // The rows of a chunk of an expert that has rows.
  __device__ __forceinline__ int chunk_rows() const {
    const int chunks = m_tiles();
    return (end_row_ - first_row_ + chunks - 1) / chunks;
  }
  // Walks on to the expert that contains tile_, and makes tile_ relative to that expert's first
  // tile. It loads several ends at once, as each load takes long.
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
  int first_row_ = 0, end_row_ = 0;  // rows of y
};

// A kind of weight in kernels whose tiles come from GroupedScheduler.
template <class Kind>
struct GroupedKind : Kind {
  using Args = GroupedWgmmaArgsOf<typename Kind::Args>;
};

}  // namespace
}  // namespace nf4::cuda
