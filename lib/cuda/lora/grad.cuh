// The gradients of an adapter's matrices, dA = scale q^T x and dB^T = scale p^T dY, in one launch.
// They are sums over the rows of x and dY, each of which is read once. Memory is the bound.
//
// lora_grad uses mma.sync. A CTA has 64 columns of x or dY and a chunk of ranks; its warps take 16
// rows in turn, each with a pipeline of its own. Their sums are added in a fixed order.
// lora_grad_any serves any dtype and GPU: a thread has 8 ranks of a column and every 4th row.
#pragma once

#include <cuda_runtime.h>

#include "cuda/arch.cuh"
#include "cuda/element.cuh"
#include "cuda/lora/grad_args.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

// The tile of a CTA: 64 columns of one gradient and some ranks.
struct LoraGradTile {
  const LoraGradHalf &half;
  bool of_b;
  int64_t first_column;
  int first_rank;
};

__device__ __forceinline__ LoraGradTile lora_grad_tile(const LoraGradArgs &args, int ranks) {
  const int64_t tile = blockIdx.x / args.rank_chunks;
  const bool of_b = tile >= args.tiles_of_a;
  return {of_b ? args.b : args.a, of_b, (tile - (of_b ? args.tiles_of_a : 0)) * kLoraGradColumns,
          static_cast<int>(blockIdx.x % args.rank_chunks) * ranks};
}

// 16 rows of both matrices in shared memory, in chunks of 16 bytes. The chunks of a row are
// permuted, so that ldmatrix finds those of eight rows in all banks.
template <int kRanks>
struct LoraGradStage {
  static constexpr LoraGradSmem kSmem = lora_grad_smem(kRanks);
  static constexpr int kRightChunks = kLoraGradColumns / 8, kLeftChunks = kRanks / 8;

  uint4 right[16][kRightChunks];
  uint4 left[16][kLeftChunks];

  static __device__ __forceinline__ int right_at(int row, int chunk) { return chunk ^ row % 8; }
  static __device__ __forceinline__ int left_at(int row, int chunk) {
    return chunk ^ row % 8 * kLeftChunks / 8;
  }
};

// Copies eight 16-bit elements. `count` of them are in the matrix; the others become 0.
__device__ __forceinline__ void copy_chunk(uint4 *to, const uint16_t *from, int64_t count,
                                           bool vectors) {
  if (vectors) return cp_async_16(to, from, count > 0 ? 16 : 0);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < count ? from[2 * i] : 0;
    const uint32_t high = 2 * i + 1 < count ? from[2 * i + 1] : 0;
    words[i] = low | high << 16;
  }
  *to = {words[0], words[1], words[2], words[3]};
}

// The copies of a warp's rows: every 8th group of 16 rows, from 16 * warp on.
template <bool kVectors, int kRanks>
class LoraGradPipeline {
 public:
  using Stage = LoraGradStage<kRanks>;
  static constexpr LoraGradSmem kSmem = Stage::kSmem;
  static_assert(sizeof(Stage) == kSmem.stage_bytes);

  __device__ __forceinline__ LoraGradPipeline(const LoraGradArgs &args, const LoraGradTile &tile,
                                              void *shared)
      : args_(args),
        tile_(tile),
        stages_(static_cast<Stage *>(shared) + threadIdx.x / 32 * kSmem.stages),
        row_(threadIdx.x / 32 * 16) {}
  // Issues the copies of the next rows into the stage that was read first. All lanes call it, after
  // they have read that stage.
  __device__ __forceinline__ void load_next() {
    if (row_ < args_.m) load(stages_[load_stage_]);
    cp_async_commit();
    row_ += kLoraGradThreads / 32 * 16;
    load_stage_ = load_stage_ == kSmem.stages - 1 ? 0 : load_stage_ + 1;
  }
  // Waits for the next rows.
  __device__ __forceinline__ const Stage &wait_next() {
    cp_async_wait<kSmem.stages - 1>();
    __syncwarp();
    const Stage &stage = stages_[read_stage_];
    read_stage_ = read_stage_ == kSmem.stages - 1 ? 0 : read_stage_ + 1;
    return stage;
  }

 private:
  __device__ __forceinline__ void load(Stage &stage) {
    constexpr int kRightChunks = Stage::kRightChunks, kLeftChunks = Stage::kLeftChunks;
    const LoraGradHalf &half = tile_.half;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = lane; i < 16 * kRightChunks; i += 32) {
      const int row = i / kRightChunks, chunk = i % kRightChunks;
      const int64_t m = row_ + row, column = tile_.first_column + chunk * 8;
      copy_chunk(&stage.right[row][Stage::right_at(row, chunk)],
                 static_cast<const uint16_t *>(half.right) + m * half.right_stride + column,
                 m < args_.m ? half.columns - column : 0, kVectors);
    }
#pragma unroll
    for (int i = lane; i < 16 * kLeftChunks; i += 32) {
      const int row = i / kLeftChunks, chunk = i % kLeftChunks;
      const int64_t m = row_ + row;
      const int rank = tile_.first_rank + chunk * 8;
      copy_chunk(&stage.left[row][Stage::left_at(row, chunk)],
                 static_cast<const uint16_t *>(half.left) + m * args_.rank + rank,
                 m < args_.m ? args_.rank - rank : 0, half.left_vectors);
    }
  }

  const LoraGradArgs &args_;
  const LoraGradTile &tile_;
  Stage *stages_;
  int64_t row_;
  int load_stage_ = 0, read_stage_ = 0;
};

// A warp's sums of a tile. A of mma is left^T, and B is right: both are stored by rows of the sum.
template <int kRanks>
struct LoraGradSums {
  static constexpr int kRankTiles = kRanks / 16, kColumnTiles = kLoraGradColumns / 8;
  using Stage = LoraGradStage<kRanks>;

  float sums[kRankTiles][kColumnTiles][4] = {};

  template <class T>
  __device__ __forceinline__ void add(const Stage &stage) {
    const int lane = threadIdx.x % 32, row = lane % 16, a_row = lane / 16 * 8 + lane % 8;
    uint32_t a[kRankTiles][4];
#pragma unroll
    for (int i = 0; i < kRankTiles; ++i)
      ldmatrix_x4_trans(a[i], &stage.left[a_row][Stage::left_at(a_row, i * 2 + lane / 8 % 2)]);
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, &stage.right[row][Stage::right_at(row, j + lane / 16)]);
#pragma unroll
      for (int i = 0; i < kRankTiles; ++i) {
        mma_m16n8k16(T{}, sums[i][j], a[i], b[0], b[1]);
        mma_m16n8k16(T{}, sums[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }

  // Stores the sums in the order of the output.
  template <bool kOfB>
  __device__ __forceinline__ void store(float *to) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kRankTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int rank = i * 16 + k / 2 * 8 + g, column = j * 8 + t * 2 + k % 2;
          to[kOfB ? column * Stage::kSmem.b_row + rank : rank * Stage::kSmem.a_row + column] =
              sums[i][j][k];
        }
  }
};

template <class O>
struct alignas(sizeof(O) * 4) LoraGradQuad {
  O elements[4];
};

// Stores four neighbours in a row of the output; `count` of them are in it.
template <class O>
__device__ __forceinline__ void store_quad(O *to, float4 values, int64_t count, bool vectors) {
  const LoraGradQuad<O> quad{from_float<O>(values.x), from_float<O>(values.y),
                             from_float<O>(values.z), from_float<O>(values.w)};
  if (vectors && count > 0) *reinterpret_cast<LoraGradQuad<O> *>(to) = quad;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (!vectors && i < count) to[i] = quad.elements[i];
}

// Adds up the sums of the CTA's first warps, which are in shared memory, and stores them.
template <class O, bool kOfB, int kRanks>
__device__ __forceinline__ void store_sums(const LoraGradArgs &args, const LoraGradTile &tile,
                                           const uint8_t *shared, int warps) {
  constexpr LoraGradSmem kSmem = LoraGradStage<kRanks>::kSmem;
  constexpr int kRows = kOfB ? kLoraGradColumns : kRanks;
  constexpr int kRowQuads = (kOfB ? kRanks : kLoraGradColumns) / 4;
  constexpr int kRowBytes = (kOfB ? kSmem.b_row : kSmem.a_row) * 4;
  const LoraGradHalf &half = tile.half;
  const int64_t first_row = kOfB ? tile.first_column : tile.first_rank;
  const int64_t first_column = kOfB ? tile.first_rank : tile.first_column;
  const int64_t rows = kOfB ? half.columns : args.rank;
  const int64_t columns = kOfB ? args.rank : half.columns;
  for (int i = threadIdx.x; i < kRows * kRowQuads; i += kLoraGradThreads) {
    const int row = i / kRowQuads, quad = i % kRowQuads;
    float4 sum{};
#pragma unroll 8
    for (int j = 0; j < warps; ++j) {
      const float4 of_warp = *reinterpret_cast<const float4 *>(shared + j * kSmem.sums_bytes +
                                                               row * kRowBytes + quad * 16);
      sum.x += of_warp.x, sum.y += of_warp.y, sum.z += of_warp.z, sum.w += of_warp.w;
    }
    const int64_t out_row = first_row + row, out_column = first_column + quad * 4;
    if (out_row < rows)
      store_quad(static_cast<O *>(half.out) + out_row * half.out_stride + out_column,
                 {sum.x * args.scale, sum.y * args.scale, sum.z * args.scale, sum.w * args.scale},
                 columns - out_column, half.out_vectors);
  }
}

// All threads of the CTA call it.
template <class T, bool kOfB, int kRanks>
__device__ __forceinline__ void finish_tile(const LoraGradArgs &args, const LoraGradTile &tile,
                                            const LoraGradSums<kRanks> &sums, uint8_t *shared) {
  const int warp = threadIdx.x / 32;
  const int64_t steps = (args.m + 15) / 16;
  // The warps that have rows.
  const int warps = static_cast<int>(min(steps, int64_t{kLoraGradThreads / 32}));
  __syncthreads();  // every warp has read all stages
  if (warp < warps)
    sums.template store<kOfB>(
        reinterpret_cast<float *>(shared + warp * LoraGradStage<kRanks>::kSmem.sums_bytes));
  __syncthreads();
  if (args.out_is_fp32)
    store_sums<float, kOfB, kRanks>(args, tile, shared, warps);
  else
    store_sums<T, kOfB, kRanks>(args, tile, shared, warps);
}

// With kVectors, rows of x and dY are on 16-byte boundaries, and columns are multiples of 8.
template <class Arch, class T, bool kVectors, int kRanks>
__global__ void __launch_bounds__(kLoraGradThreads, kRanks > 16 ? 1 : 3)
    lora_grad(const __grid_constant__ LoraGradArgs args) {
  using Pipeline = LoraGradPipeline<kVectors, kRanks>;
  constexpr int kWarps = kLoraGradThreads / 32;
  extern __shared__ __align__(16) uint8_t shared[];
  const LoraGradTile tile = lora_grad_tile(args, kRanks);
  Pipeline pipeline(args, tile, shared);
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();

  LoraGradSums<kRanks> sums;
#pragma unroll 1
  for (int i = 0; i < Pipeline::kSmem.stages; ++i) pipeline.load_next();
#pragma unroll 1
  for (int64_t row = threadIdx.x / 32 * 16; row < args.m; row += kWarps * 16) {
    sums.template add<T>(pipeline.wait_next());
    __syncwarp();
    pipeline.load_next();
  }
  if (tile.of_b)
    finish_tile<T, true>(args, tile, sums, shared);
  else
    finish_tile<T, false>(args, tile, sums, shared);
}

template <class Arch, class T>
__global__ void __launch_bounds__(kLoraGradThreads)
    lora_grad_any(const __grid_constant__ LoraGradArgs args) {
  constexpr int kRanks = kLoraGradAnyRanks, kColumns = kLoraGradColumns;
  constexpr int kGroups = kLoraGradThreads / kColumns;
  __shared__ float partials[kGroups][kRanks][kColumns];
  const LoraGradTile tile = lora_grad_tile(args, kRanks);
  const LoraGradHalf &half = tile.half;
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const int in_tile = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
  const int64_t column = tile.first_column + in_tile;
  float sums[kRanks] = {};
  for (int64_t m = group; column < half.columns && m < args.m; m += kGroups) {
    const float right =
        to_float(static_cast<const T *>(half.right)[m * half.right_stride + column]);
    const T *const left = static_cast<const T *>(half.left) + m * args.rank + tile.first_rank;
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (tile.first_rank + r < args.rank) sums[r] = __fmaf_rn(to_float(left[r]), right, sums[r]);
  }
#pragma unroll
  for (int r = 0; r < kRanks; ++r) partials[group][r][in_tile] = sums[r];
  __syncthreads();
  for (int r = group; r < kRanks && tile.first_rank + r < args.rank; r += kGroups) {
    float sum = 0;
    for (int i = 0; i < kGroups; ++i) sum += partials[i][r][in_tile];
    const int64_t rank = tile.first_rank + r;
    const int64_t at =
        tile.of_b ? column * half.out_stride + rank : rank * half.out_stride + column;
    if (column >= half.columns) return;
    if (args.out_is_fp32)
      static_cast<float *>(half.out)[at] = sum * args.scale;
    else
      static_cast<T *>(half.out)[at] = from_float<T>(sum * args.scale);
  }
}

}  // namespace
}  // namespace nf4::cuda
