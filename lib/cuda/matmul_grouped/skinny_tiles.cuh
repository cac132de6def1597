// The order in which the skinny kernel's CTAs and warps walk over the warp tiles of all experts.
//
// A row of warp tiles is 16 rows of an expert's weight by a chunk of its rows of x. The CTAs have
// equal shares of all of them, chunk after chunk. A share is cut into groups, each within one
// chunk, whose partial sums and scales fit in shared memory.
#pragma once

#include <cstdint>

#include "cuda/matmul/skinny/epilogue.cuh"
#include "cuda/matmul/skinny/mainloop.cuh"
#include "cuda/matmul/skinny/smem.hpp"
#include "cuda/matmul_grouped/routing.cuh"

namespace nf4::cuda {
namespace {

// The groups of a CTA, one after another. All lanes of a warp call each function.
template <class Args, int kMaxM>
class TileGroups {
 public:
  using ChunkRouting = Routing<kMaxM>;

  __device__ __forceinline__ TileGroups(const Args &args, const ChunkRouting &routing)
      : args_(args), routing_(routing) {
    const int chunks = routing.chunks(), tiles = chunks * args.expert_tiles;
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int share = tiles / ctas, larger = tiles - share * ctas;
    // A CTA waits long for the x of a second chunk. With few chunks each CTA has one, unless that
    // gives some CTA much more work.
    const int chunk_ctas = chunks == 0 ? 0 : ctas / chunks;
    const int part = chunk_ctas == 0 ? 0 : (args.expert_tiles + chunk_ctas - 1) / chunk_ctas;
    if (chunk_ctas > 0 && part <= share + 1 + share / 16) {
      index_ = cta / chunk_ctas;
      tile_ = (cta - index_ * chunk_ctas) * part;
      left_ = index_ < chunks ? min(part, args.expert_tiles - tile_) : 0;
    } else {
      const int first = cta * share + min(cta, larger);
      left_ = share + (cta < larger);
      index_ = first / args.expert_tiles;
      tile_ = first - index_ * args.expert_tiles;
    }
    if (left_ > 0) chunk_ = routing_.at(index_);
  }

  __device__ __forceinline__ bool is_valid() const { return left_ > 0; }
  __device__ __forceinline__ const RowChunk &chunk() const { return chunk_; }
  // The group's first row in the expert's weight, its rows of warp tiles, and its rows.
  __device__ __forceinline__ int row() const { return tile_ * kWarpTileN; }
  __device__ __forceinline__ int tiles() const {
    return min(min(args_.work.group_tiles, left_), args_.expert_tiles - tile_);
  }
  __device__ __forceinline__ int rows() const {
    return min(tiles() * kWarpTileN, expert_rows() - row());
  }
  // The first row in the stack of all experts.
  __device__ __forceinline__ int weight_row() const {
    return chunk_.expert * expert_rows() + row();
  }

  // The columns of an expert.
  __device__ __forceinline__ int cols() const { return static_cast<int>(args_.matmul.weight.cols); }

  // Advances to the next group; returns whether it is in another chunk.
  __device__ __forceinline__ bool advance() {
    const int tiles_of_group = tiles();
    left_ -= tiles_of_group;
    tile_ += tiles_of_group;
    if (tile_ < args_.expert_tiles || left_ == 0) return false;
    tile_ = 0;
    chunk_ = routing_.at(++index_);
    return true;
  }

 private:
  __device__ __forceinline__ int expert_rows() const {
    return static_cast<int>(args_.groups.expert_rows);
  }

  const Args &args_;
  const ChunkRouting &routing_;
  RowChunk chunk_{};
  int left_;   // rows of warp tiles, from the group on
  int index_;  // index of the chunk
  int tile_;   // in the chunk
};

// The warp tiles of a warp, in its order: in each group, for each of its K-tiles, every n_warps-th
// row of tiles. Experts lie one after another along N, or along K.
template <class Args, int kMaxM, int kWarps, bool kAlongK = false>
class GroupTileIterator {
 public:
  // first_tile is work.group_tiles or more if the warp has no tiles.
  __device__ __forceinline__ GroupTileIterator(const SkinnyWork &work,
                                               const TileGroups<Args, kMaxM> &groups,
                                               int first_tile, int first_k_tile)
      : work_(work),
        groups_(groups),
        first_tile_(first_tile),
        first_k_tile_(first_k_tile),
        tile_(first_tile),
        k_tile_(first_k_tile) {
    skip_groups();
  }
  __device__ __forceinline__ bool is_valid() const {
    return first_tile_ < work_.group_tiles && groups_.is_valid();
  }
  // The row in the stack of all experts.
  __device__ __forceinline__ int row() const {
    return (kAlongK ? groups_.row() : groups_.weight_row()) + tile_ * kWarpTileN;
  }
  __device__ __forceinline__ int column() const {
    const int first = kAlongK ? groups_.chunk().expert * groups_.cols() : 0;
    return first + k_tile_ * kWarpTileK;
  }
  __device__ __forceinline__ void advance() {
    tile_ += work_.n_warps;
    if (tile_ < groups_.tiles()) return;
    tile_ = first_tile_;
    k_tile_ += kWarps;
    if (k_tile_ < work_.k_tiles) return;
    k_tile_ = first_k_tile_;
    groups_.advance();
    skip_groups();
  }

 private:
  // Skips groups with too few rows of tiles to give this warp one.
  __device__ __forceinline__ void skip_groups() {
    while (is_valid() && first_tile_ >= groups_.tiles()) groups_.advance();
  }

  const SkinnyWork &work_;
  TileGroups<Args, kMaxM> groups_;
  int first_tile_, first_k_tile_, tile_, k_tile_;
};

// The rows of x of a chunk.
template <class Matmul>
struct ChunkX {
  const Matmul &matmul;
  const Groups &groups;
  const RowChunk &chunk;
};
template <class T, class Matmul>
__device__ __forceinline__ XRow<T> x_row(const ChunkX<Matmul> &x, int m) {
  if (m >= x.chunk.rows) return {nullptr, false};
  const int64_t row = x_row_of(x.groups, x.matmul.m, x.chunk.first_row + m);
  return {static_cast<const T *>(x.matmul.x) + row * x.matmul.x_stride, row < x.matmul.m};
}
template <class Matmul>
__device__ __forceinline__ int64_t x_cols(const ChunkX<Matmul> &x) {
  return x.matmul.weight.cols;
}
template <class T, class Matmul>
__device__ __forceinline__ const T *x_start(const ChunkX<Matmul> &x) {
  return static_cast<const T *>(x.matmul.x);
}

// Adds up the group's sums and stores its part of y.
template <class T, class WarpMma, class Args>
__device__ __forceinline__ void store_group(const Args &args,
                                            const TileGroups<Args, WarpMma::kMaxM> &group,
                                            const PartialSums<WarpMma> &sums, float unit) {
  constexpr uint32_t kMaxM = WarpMma::kMaxM, kTilePartials = sums.kTilePartials;
  const RowChunk &chunk = group.chunk();
  const uint32_t outputs = group.tiles() * kTilePartials;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < outputs; i += 32 * kWarpsOf<WarpMma>) {
    const uint32_t tile = i / kTilePartials, within = i % kTilePartials, m = within % kMaxM;
    const int row = tile * kWarpTileN + WarpMma::row_at(within / kMaxM);
    if (static_cast<int>(m) >= chunk.rows || row >= group.rows()) continue;
    const uint32_t first_warp =
        args.work.n_warps == 1 ? 0 : tile % args.work.n_warps * args.work.k_warps;
    const float *const partial = sums.of_warp(tile, first_warp) + within;
    float sum = unit * add_partials<WarpMma>(partial, args.work.k_warps);
    const int n = group.row() + row, y_row = chunk.first_row + static_cast<int>(m);
    if constexpr (kHasGlobalScales<WarpMma>)
      sum *= GlobalScales(args.matmul.weight).of(group.weight_row() + row);
    static_cast<T *>(args.matmul.y)[y_row * args.matmul.y_stride + n] =
        from_float<T>(finish_output<T>(args.matmul, args.groups, chunk.expert, y_row, n, sum));
  }
}

}  // namespace
}  // namespace nf4::cuda
