// The tile scheduler of grouped products, and x gathered by rows.
#pragma once

#include "cuda/matmul/wgmma/codebook.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul_grouped/routing.cuh"
#include "cuda/matmul_grouped/wgmma_args.hpp"
#include "cuda/ptx/cp_async.cuh"

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
template <bool GathersX>
struct GroupedKind : CodebookKind<false> {
  using Args = GroupedWgmmaArgs;
  static constexpr bool kGathersX = GathersX;
  // Behind the scale code: which row of x each row of a tile is.
  static constexpr int kScaleCodeOwnBytes = CodebookKind<false>::kScaleCodeBytes;
  static constexpr int kScaleCodeBytes = kScaleCodeOwnBytes + (GathersX ? 320 * 4 : 0);

  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void load_scales(const Args &args, SharedStorage<Tile> shared,
                                                     int thread) {
    if (args.matmul.weight.nested_absmax != nullptr)
      nf4::cuda::load_scales<NestedScales, Tile, Scheduler>(args, shared, thread);
    else
      nf4::cuda::load_scales<FlatScales, Tile, Scheduler>(args, shared, thread);
  }

  // One warp, in place of load_x: rows of x by cp.async, in the swizzle that TMA would give them.
  template <class Tile, class Scheduler>
  static __device__ __forceinline__ void gather_x(const Args &args, SharedStorage<Tile> shared) {
    static_assert(Tile::kTileM * 4 <= kScaleCodeBytes - kScaleCodeOwnBytes);
    int *const x_rows = reinterpret_cast<int *>(shared.scale_code()) + kScaleCodeOwnBytes / 4;
    XPipelineState<Tile> state;
    for_each_work_tile<Scheduler>(args, [&](const Scheduler &scheduler) {
      const WorkTile work = scheduler.work_tile();
      __syncwarp();  // before the last tile's are overwritten
      find_rows<Tile>(args, work.m, static_cast<int>(scheduler.m_end(work)), x_rows);
      __syncwarp();
      for (int step = 0; step < args.k_tiles * 2; ++step) {
        mbarrier_wait_parity(shared.barrier(kXEmpty, state.stage), state.phase ^ 1);
        copy_step<Tile>(args, step * kStepK, x_rows, shared.x(state.stage));
        cp_async_mbarrier_arrive(shared.barrier(kXFull, state.stage));
        state.advance();
      }
    });
    cp_async_wait_all();
  }

 private:
  // Of each row of a tile, the row of x, or -1.
  template <class Tile>
  static __device__ __forceinline__ void find_rows(const Args &args, int first_row, int end_row,
                                                   int *to) {
#pragma unroll 4
    for (int row = static_cast<int>(threadIdx.x) % 32; row < Tile::kTileM; row += 32) {
      const int x_row = args.groups.x_index[min(first_row + row, end_row - 1)];
      to[row] = first_row + row < end_row && x_row < args.matmul.m ? x_row : -1;
    }
  }

  // 64 columns of the rows, of which a lane copies 16 bytes of every fourth; zeros for rows and
  // columns that do not exist.
  template <class Tile>
  static __device__ __forceinline__ void copy_step(const Args &args, int first_column,
                                                   const int *x_rows, uint8_t *to) {
    constexpr int kRowChunks = kStepK / 8, kRowStep = 32 / kRowChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kRowChunks;
    const int column = first_column + chunk * 8;
    const auto *const x = static_cast<const uint16_t *>(args.matmul.x);
    const bool in_row = column < args.matmul.weight.cols;
#pragma unroll 8
    for (int row = static_cast<int>(threadIdx.x % 32) / kRowChunks; row < Tile::kTileM;
         row += kRowStep) {
      const bool exists = in_row & (x_rows[row] >= 0);
      cp_async_16(to + row * (kStepK * 2) + (chunk ^ row % 8) * 16,
                  exists ? x + x_rows[row] * args.matmul.x_stride + column : x, exists ? 16 : 0);
    }
  }
};

}  // namespace
}  // namespace nf4::cuda
