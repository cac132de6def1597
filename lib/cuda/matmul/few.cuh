// y = x W^T for up to 16 rows of x. The weight is read once, straight from its bytes into the
// fragments of tensor cores, so memory bounds it: 0.516 bytes for each weight.
//
// A thread block owns rows of the weight, and each of its 16 warps a slice of 256 columns of
// them, so that a warp's part of x stays in registers for all of its rows. A tile of 16 rows
// is the A operand, x the B operand: a dot product does not care about the order of its terms,
// so a lane takes bytes that lie together, and x is loaded in the order that this makes.
// A byte becomes two numbers of 16 bits by one look-up in a table of all 256, of which each
// lane has its own copy in its own bank: one PRMT makes the address, one LDS reads. The scales
// are applied to the fp32 sums of each block, which is more exact than a rounded product.
// Cost per 8 weights and lane: 4 PRMT, 4 LDS and a half to two MMA, of 33 issue slots that
// memory leaves at 31 weights per clock and multiprocessor of an H200.
//
// Log, bf16 nested on an H200, microseconds, plain / with PDL; the weight's bytes alone take
// 8.4 at 14336x4096 and 3.9 at 4096x4096:
//   14336x4096, M = 1  17.0 / 15.6  weights from global memory to registers, two tiles in
//                                   flight: 4.3 and 1.67 for each round of 16 warps
//                      16.6 / 15.6  the same with 250 instructions a tile in place of 315
//                                   (predicted 14: issue slots do not bound it; 32 lines
//                                   asked for a tile beside 64 look-ups may)
//    4096x4096, M = 1   9.2 / 7.7   to 7.9 / 6.7 by a prologue without divisions and inlined
//                                   once (predicted 1 less)
//   14336x4096, M = 8  20.9 / 19.7  to 19.1 / 18.3 by partial sums without bank conflicts
#pragma once

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/pairs.cuh"
#include "cuda/matmul/quarters.cuh"
#include "cuda/matmul/ring.cuh"
#include "cuda/matmul/scales.cuh"
#include "cuda/memory.cuh"

namespace nf4::cuda {
namespace {

// The rows of the weight that a thread block owns: shares differ by one row at most.
struct RowShare {
  int64_t first;
  int64_t count;
  __device__ __forceinline__ explicit RowShare(const MatmulArgs &args)
      : first(blockIdx.x * args.block_rows + min(static_cast<int>(blockIdx.x), args.more_rows)),
        count(args.block_rows + (static_cast<int>(blockIdx.x) < args.more_rows)) {}
};

__device__ __forceinline__ int tiles_of(int64_t rows) {
  return static_cast<int>((rows + kTileRows - 1) / kTileRows);
}

// ---- Where a lane's bytes are ------------------------------------------------------------

// Which slices and tiles a warp takes: with fewer slices than warps, several warps share a
// slice's tiles; with more, a warp takes another slice after its first.
struct WarpShare {
  int64_t slices;
  int64_t first_slice;
  int first_tile;

  __device__ __forceinline__ explicit WarpShare(const MatmulArgs &args)
      : slices((args.cols + kSlice - 1) / kSlice) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    first_tile = warp / args.together;
    first_slice = first_tile < args.tile_step ? warp % args.together : slices;
  }
};

// Rows of the weight whose partial sums shared memory holds at a time.
struct RowGroup {
  int64_t first;
  int64_t count;
};

// A lane's scales of a slice of a group: those of a quarter of it. Offsets from the group's
// first row have 32 bits.
template <bool Nested>
class ScaleSource {
 public:
  ScaleSource() = default;
  __device__ __forceinline__ ScaleSource(const MatmulArgs &args, RowGroup group, int64_t slice)
      : row_elements_(static_cast<int>(args.cols)), last_row_(static_cast<int>(group.count) - 1) {
    const int64_t first = group.first * args.cols;
    const int64_t block = first >> args.blocksize_log2;
    const int64_t quarter = slice * kSlice + FragmentLane().member * kQuarter;
    // Where there is no such column the scale counts for nothing, and must not be a NaN of
    // another row's.
    column_ = static_cast<int>(first & ((int64_t{1} << args.blocksize_log2) - 1)) +
              (quarter < args.cols ? static_cast<int>(quarter) : 0);
    absmax_ = static_cast<const uint8_t *>(args.absmax) + block * (Nested ? 1 : 4);
    if constexpr (Nested) {
      nested_absmax_ = args.nested_absmax + (block >> args.nested_blocksize_log2);
      nested_phase_ = static_cast<int>(block & ((int64_t{1} << args.nested_blocksize_log2) - 1));
    }
  }

  // Rows past the end have the last one's, and their sums are not used.
  __device__ __forceinline__ FetchedScale<Nested> fetch(const MatmulArgs &args, int row) const {
    const int block = (column_ + min(row, last_row_) * row_elements_) >> args.blocksize_log2;
    if constexpr (Nested)
      return {__ldg(nested_absmax_ + ((nested_phase_ + block) >> args.nested_blocksize_log2)),
              __ldg(absmax_ + block)};
    else
      return {__ldg(reinterpret_cast<const float *>(absmax_) + block), 0};
  }

 private:
  const uint8_t *absmax_;
  const float *nested_absmax_;
  int row_elements_;
  int last_row_;
  int column_;
  int nested_phase_;
};

// ---- The kernel --------------------------------------------------------------------------

// A warp's way through slices of groups: kFewSlots tiles are on their way or being read.
template <class Arch, bool Nested, class Quarters>
class Walk {
 public:
  __device__ __forceinline__ Walk(const FewArgs &args, uint8_t *shared)
      : args_(args.matmul), ring_(args, shared), step_(args.matmul.tile_step) {}

  // Starts the copies of a slice, from the tile `first_tile` on.
  __device__ __forceinline__ void start(RowGroup group, int64_t slice, int first_tile) {
    tiles_ = tiles_of(group.count);
    tile_ = first_tile;
    ring_.start(group.first, slice);
    scales_ = ScaleSource<Nested>(args_, group, slice);
#pragma unroll
    for (int i = 0; i < kFewSlots; ++i) fill(i, tile_ + i * step_);
    quarters_.load_x(args_, slice);
  }

  // Puts its sums into the warp's partial sums, where `before` says that there are some.
  __device__ __forceinline__ void finish(PairTable table, const float *code, float offset,
                                         bool before, float *partials) {
    constexpr int kTilePartials = kTileRows * Quarters::kMaxM;
    float *const own = partials + threadIdx.x / 32 * kTilePartials;
#pragma unroll 1
    for (; tile_ < tiles_; tile_ += kFewSlots * step_) {
#pragma unroll
      for (int i = 0; i < kFewSlots; ++i) {
        const int tile = tile_ + i * step_;
        if (tile >= tiles_) break;
        const float scale = finish_scale(fetched_[i][0], code, offset);
        const float scale8 = finish_scale(fetched_[i][1], code, offset);
        quarters_.add(ring_.wait(i), table, scale, scale8, before,
                      own + tile * kFewWarps * kTilePartials);
        __syncwarp();  // before the slot is written again
        fill(i, tile + kFewSlots * step_);
      }
    }
  }

 private:
  __device__ __forceinline__ void fill(int slot, int tile) {
    if (tile >= tiles_) return ring_.skip();
    ring_.fill(slot, tile);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      fetched_[slot][half] = scales_.fetch(args_, tile * kTileRows + Quarters::row(half));
  }

  const MatmulArgs &args_;
  TileRing<Arch> ring_;
  const int step_;
  int tiles_;
  int tile_;
  ScaleSource<Nested> scales_;
  FetchedScale<Nested> fetched_[kFewSlots][2];
  Quarters quarters_;
};

// Adds up what the warps have, always in the same order, and writes y.
template <class T, int kMaxM>
__device__ __forceinline__ void write_group(const MatmulArgs &args, RowGroup group, float factor,
                                            const float *partials) {
  constexpr int kTilePartials = kTileRows * kMaxM;
  const T *bias = static_cast<const T *>(args.bias);
  for (int i = threadIdx.x; i < static_cast<int>(group.count) * kMaxM; i += kFewThreads) {
    const int row = i / kMaxM, of_x = i % kMaxM, tile = row / kTileRows;
    if (of_x >= args.m) continue;
    const int first_warp = tile % args.tile_step * args.together;
    const float *partial =
        partials + (tile * kFewWarps + first_warp) * kTilePartials + i % kTilePartials;
    float sum = 0;
#pragma unroll 4
    for (int warp = 0; warp < args.together; ++warp) sum += partial[warp * kTilePartials];
    const float start = bias == nullptr ? 0.0f : to_float(bias[group.first + row]);
    static_cast<T *>(args.y)[of_x * args.y_stride + group.first + row] =
        from_float<T>(__fmaf_rn(sum, factor, start));
  }
}

// Asks L2 for the first weights, which may be done while the predecessor still writes.
template <class Arch>
__device__ __forceinline__ void prefetch_rows(const MatmulArgs &args, const RowShare &share) {
  if constexpr (Arch::kBulkPrefetch) {
    constexpr int64_t kBytes = 65536;
    if (threadIdx.x != 0) return;
    const int64_t bytes = min(share.count * args.cols / 2, kBytes) / 16 * 16;
    if (bytes > 0)
      prefetch_l2<Arch>(args.packed + share.first * args.cols / 2, static_cast<uint32_t>(bytes));
  }
}

// For cols that are a multiple of kQuarter, and rows of the weight on 16-byte boundaries.
template <class Arch, class T, bool Nested, class Quarters>
__global__ void __launch_bounds__(kFewThreads, 1) matmul_few(const __grid_constant__ FewArgs few) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const MatmulArgs &args = few.matmul;
  const RowShare share(args);
  prefetch_rows<Arch>(args, share);
  Walk<Arch, Nested, Quarters> walk(few, shared);
  wait_for_predecessor<Arch>();
  start_dependents<Arch>();
  float *const code = reinterpret_cast<float *>(shared + kFewCodeOffset);
  float *const partials = reinterpret_cast<float *>(shared + kFewFixedBytes);
  const PairTable table(shared);
  const WarpShare warp(args);
  bool have_tables = false;
  float factor = 1, offset = 0;
  for (int64_t done = 0; done < share.count; done += int64_t{args.group_tiles} * kTileRows) {
    const RowGroup group{share.first + done,
                         min(int64_t{args.group_tiles} * kTileRows, share.count - done)};
    // All warps go through it equally often, for the barrier.
#pragma unroll 1
    for (int64_t slice = warp.first_slice, turn = 0; turn < warp.slices;
         slice += kFewWarps, turn += kFewWarps) {
      if (slice < warp.slices) walk.start(group, slice, warp.first_tile);
      if (!have_tables) {
        factor = build_pair_table<T, kFewThreads>(args.codebook, args.format, shared);
        offset = share_scale_code<Nested>(args, code);
        __syncthreads();
        have_tables = true;
      }
      if (slice < warp.slices) walk.finish(table, code, offset, turn != 0, partials);
    }
    __syncthreads();
    write_group<T, Quarters::kMaxM>(args, group, factor, partials);
    __syncthreads();
  }
}

}  // namespace
}  // namespace nf4::cuda
