// The pipeline of warp tiles of the weight to shared memory. Each warp has its own, so that no warp
// waits for another.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/matmul/skinny/args.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace nf4::cuda {
namespace {

// A warp tile in shared memory: 16 rows of 128 bytes in the 128-byte swizzle, in which the 16-byte
// chunks of one column of 8 rows are in different banks.
class StageTile {
 public:
  __device__ __forceinline__ explicit StageTile(uint8_t *bytes) : bytes_(bytes) {}
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * (kWarpTileK / 2) + (chunk ^ row % 8) * 16;
  }
  __device__ __forceinline__ uint8_t *address(int row, int chunk) const {
    return bytes_ + offset(row, chunk);
  }
  __device__ __forceinline__ uint4 chunk(uint32_t offset) const {
    return *reinterpret_cast<const uint4 *>(bytes_ + offset);
  }
  __device__ __forceinline__ uint2 pair(uint32_t offset) const {
    return *reinterpret_cast<const uint2 *>(bytes_ + offset);
  }
  __device__ __forceinline__ uint2 half_chunk(int row, int index, int half) const {
    return *reinterpret_cast<const uint2 *>(address(row, index) + half * 8);
  }

 private:
  uint8_t *bytes_;
};

// The words of a lane's two rows of a warp tile, in registers.
template <class Words>
struct LaneTile {
  static constexpr int kCount = 32 / sizeof(Words);
  Words words[2][kCount];
};

// A 16-byte chunk of a warp tile: its offset in a stage and in the packed weight.
struct TileChunk {
  uint32_t to;
  int64_t from;
  bool in_bounds;
};

// How the codes of a warp tile come to shared memory: rows of the weight in the 128-byte swizzle.
struct RowCodes {
  static __device__ __forceinline__ void load_tile(uint8_t *to, const void *map, int column, int n,
                                                   uint64_t *barrier) {
    tma_load_2d(to, map, column / 2, n, barrier);
  }
  static __device__ __forceinline__ void prefetch_tile(const void *map, int column, int n) {
    tma_prefetch_2d(map, column / 2, n);
  }
  template <class View>
  static __device__ __forceinline__ TileChunk chunk(const View &weight, int column, int first_row,
                                                    int index) {
    constexpr int kRowChunks = kWarpTileK / 2 / 16;
    const int row = index / kRowChunks, chunk = index % kRowChunks;
    const int64_t row_bytes = weight.cols / 2, n = first_row + row;
    const int64_t byte = column / 2 + chunk * 16;
    const bool in_bounds = n < weight.rows && byte < row_bytes;
    return {StageTile::offset(row, chunk), in_bounds ? n * row_bytes + byte : 0, in_bounds};
  }
};

// The properties of a kind of weight that the pipeline and the sums depend on; this is NF4 and FP4.
template <class Arch_, class WarpMma>
struct CodebookSkinny {
  using Arch = Arch_;
  using Args = SkinnyArgs;
  using Codes = RowCodes;
  using Mma = WarpMma;
  static constexpr int kWarps = kWarpsOf<WarpMma>;
  static constexpr SkinnySmem kSmem =
      skinny_smem(kLayoutOf<WarpMma>, WarpMma::kMaxM, Arch::kTensorMaps);
};

// The warp tiles of a warp, in its order: in each group of rows of tiles, for each of its K-tiles,
// every n_warps-th row of tiles.
template <int kWarps = kSkinnyWarps>
class WarpTileIterator {
 public:
  __device__ __forceinline__ WarpTileIterator(const SkinnyWork &work, int tiles, int first_tile,
                                              int first_k_tile)
      : work_(work),
        // This warp has no tiles if its first one is past those of a group.
        tiles_(first_tile < work.group_tiles ? tiles : 0),
        first_k_tile_(first_k_tile),
        first_tile_(first_tile),
        tile_(first_tile_),
        k_tile_(first_k_tile_),
        group_end_(min(work.group_tiles, tiles)) {
    if (tile_ >= group_end_) next_k_tile();
  }
  __device__ __forceinline__ bool is_valid() const { return tile_ < tiles_; }
  __device__ __forceinline__ int row() const { return tile_ * kWarpTileN; }
  __device__ __forceinline__ int column() const { return k_tile_ * kWarpTileK; }
  __device__ __forceinline__ void advance() {
    tile_ += work_.n_warps;
    if (tile_ >= group_end_) next_k_tile();
  }

 private:
  __device__ __forceinline__ void next_k_tile() {
    k_tile_ += kWarps;
    if (k_tile_ >= work_.k_tiles) {
      k_tile_ = first_k_tile_;
      group_ = group_end_;
      group_end_ = min(group_end_ + work_.group_tiles, tiles_);
    }
    tile_ = group_ + first_tile_;
  }

  const SkinnyWork &work_;
  int tiles_, first_k_tile_, first_tile_, tile_, k_tile_;
  int group_ = 0;
  int group_end_;
};

// The stages of a warp: the one that is loaded next and the one that is read next.
template <class Kind>
class PipelineState {
 public:
  static constexpr int kStages = Kind::kSmem.stages;

  __device__ __forceinline__ PipelineState(uint8_t *shared, int warp)
      : stages_(shared + Kind::kSmem.pipeline + warp * kStages * kStageBytes) {}
  __device__ __forceinline__ uint8_t *load_address() const {
    return stages_ + load_stage_ * kStageBytes;
  }
  __device__ __forceinline__ StageTile read_tile() const {
    return StageTile(stages_ + read_stage_ * kStageBytes);
  }
  __device__ __forceinline__ int load_stage() const { return load_stage_; }
  __device__ __forceinline__ int read_stage() const { return read_stage_; }
  __device__ __forceinline__ void advance_load() {
    load_stage_ = load_stage_ == kStages - 1 ? 0 : load_stage_ + 1;
  }
  // Returns true if the phase of the barriers changes.
  __device__ __forceinline__ bool advance_read() {
    read_stage_ = read_stage_ == kStages - 1 ? 0 : read_stage_ + 1;
    return read_stage_ == 0;
  }

 private:
  uint8_t *const stages_;
  int load_stage_ = 0;
  int read_stage_ = 0;
};

// The pipeline with TMA: one lane issues a box.
template <class Kind, class TileIterator>
class TmaPipeline {
 public:
  __device__ __forceinline__ TmaPipeline(const typename Kind::Args &args, uint8_t *shared, int warp,
                                         int first_row, TileIterator iterator)
      : args_(args),
        iterator_(iterator),
        first_row_(first_row),
        state_(shared, warp),
        barriers_(reinterpret_cast<uint64_t *>(shared + Kind::kSmem.barriers) +
                  warp * PipelineState<Kind>::kStages) {}

  // Prefetches the first tile into L2, which is allowed while the predecessor still writes.
  __device__ __forceinline__ void prefetch() const {
    if (threadIdx.x % 32 == 0 && iterator_.is_valid())
      Kind::Codes::prefetch_tile(&args_.packed, iterator_.column(), first_row_ + iterator_.row());
  }

  // All lanes call it before everything else.
  __device__ __forceinline__ void init() {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < PipelineState<Kind>::kStages; ++i) mbarrier_init(barriers_ + i);
      fence_mbarrier_init();
    }
    __syncwarp();
  }

  // Issues the copy of the next tile, if there is one, into the stage that was read first. All
  // lanes call it, after they have read that stage.
  __device__ __forceinline__ void load_next() {
    if (!iterator_.is_valid()) return;
    if (threadIdx.x % 32 == 0) {
      uint64_t *const barrier = barriers_ + state_.load_stage();
      mbarrier_arrive_expect_tx(barrier, kStageBytes);
      Kind::Codes::load_tile(state_.load_address(), &args_.packed, iterator_.column(),
                             first_row_ + iterator_.row(), barrier);
    }
    state_.advance_load();
    iterator_.advance();
  }

  // Waits for the next tile.
  __device__ __forceinline__ StageTile wait_next() {
    mbarrier_wait_parity(barriers_ + state_.read_stage(), phase_);
    const StageTile tile = state_.read_tile();
    if (state_.advance_read()) phase_ ^= 1;
    return tile;
  }

 private:
  const typename Kind::Args &args_;
  TileIterator iterator_;
  int first_row_;
  PipelineState<Kind> state_;
  uint64_t *const barriers_;
  uint32_t phase_ = 0;
};

// The pipeline with cp.async: every lane copies 16-byte chunks.
template <class Kind, class TileIterator>
class CpAsyncPipeline {
 public:
  __device__ __forceinline__ CpAsyncPipeline(const typename Kind::Args &args, uint8_t *shared,
                                             int warp, int first_row, TileIterator iterator)
      : args_(args), iterator_(iterator), first_row_(first_row), state_(shared, warp) {}

  __device__ __forceinline__ void prefetch() const {}
  __device__ __forceinline__ void init() const {}

  __device__ __forceinline__ void load_next() {
    if (iterator_.is_valid()) {
      copy_tile();
      state_.advance_load();
      iterator_.advance();
    }
    cp_async_commit();  // also past the last tile, as wait_next counts groups
  }

  __device__ __forceinline__ StageTile wait_next() {
    cp_async_wait<PipelineState<Kind>::kStages - 1>();
    __syncwarp();  // for the chunks of the other lanes
    const StageTile tile = state_.read_tile();
    state_.advance_read();
    return tile;
  }

 private:
  __device__ __forceinline__ void copy_tile() const {
    uint8_t *const to = state_.load_address();
    const auto *const packed = reinterpret_cast<const uint8_t *>(args_.matmul.weight.packed);
#pragma unroll
    for (int i = 0; i < kStageBytes / 16; i += 32) {
      const TileChunk chunk =
          Kind::Codes::chunk(args_.matmul.weight, iterator_.column(), first_row_ + iterator_.row(),
                             i + threadIdx.x % 32);
      cp_async_16(to + chunk.to, packed + chunk.from, chunk.in_bounds ? 16 : 0);
    }
  }

  const typename Kind::Args &args_;
  TileIterator iterator_;
  int first_row_;
  PipelineState<Kind> state_;
};

// The pipeline of a GPU without cp.async: each lane loads its own words to registers. Those of the
// next tile are in flight while a tile is multiplied.
template <class Kind, class TileIterator>
class RegisterPipeline {
  using Mma = typename Kind::Mma;
  using Words = typename Mma::Words;
  using Tile = LaneTile<Words>;
  static_assert(Kind::kSmem.stages == 1);

 public:
  __device__ __forceinline__ RegisterPipeline(const typename Kind::Args &args, uint8_t *, int,
                                              int first_row, TileIterator iterator)
      : weight_(args.matmul.weight), iterator_(iterator), first_row_(first_row) {}

  __device__ __forceinline__ void prefetch() const {}
  __device__ __forceinline__ void init() const {}

  // Loads the first tile. wait_next() loads the others, as there is no stage to wait for.
  __device__ __forceinline__ void load_next() {
    if (!begun_) load();
    begun_ = true;
  }

  __device__ __forceinline__ Tile wait_next() {
    const Tile tile = next_;
    load();
    return tile;
  }

 private:
  __device__ __forceinline__ void load() {
    if (!iterator_.is_valid()) return;
    const int64_t row_bytes = weight_.cols / 2, column = iterator_.column() / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t n = int64_t{first_row_} + iterator_.row() + Mma::row(half);
      const uint8_t *const row = weight_.packed + n * row_bytes + column;
#pragma unroll
      for (int i = 0; i < Tile::kCount; ++i) {
        const int offset = Mma::word_offset(i);
        const bool in_bounds = n < weight_.rows && column + offset < row_bytes;
        next_.words[half][i] = in_bounds ? *reinterpret_cast<const Words *>(row + offset) : Words{};
      }
    }
    iterator_.advance();
  }

  const WeightView &weight_;
  TileIterator iterator_;
  const int first_row_;
  bool begun_ = false;
  Tile next_{};
};

// `TileIterator` is the warp's order of warp tiles. It gives the row of the weight, relative to the
// pipeline's first one, and its first column; in a stack of experts along K, the column in the
// stack.
template <class Kind, class TileIterator = WarpTileIterator<Kind::kWarps>>
using WeightPipeline = std::conditional_t<
    Kind::Arch::kTensorMaps, TmaPipeline<Kind, TileIterator>,
    std::conditional_t<Kind::Arch::kTensorCores, CpAsyncPipeline<Kind, TileIterator>,
                       RegisterPipeline<Kind, TileIterator>>>;

}  // namespace
}  // namespace nf4::cuda
