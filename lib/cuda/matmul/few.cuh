// y = x W^T for up to 16 rows of x. The weight is read once, from its bytes into the fragments
// of tensor cores, so memory bounds it: 0.516 bytes for each weight.
//
// A thread block owns rows of the weight, and each of its 16 warps a slice of 256 columns of
// them, so that a warp's part of x stays in registers for all of its rows. A tile of 16 rows
// is the A operand, x the B operand: a dot product does not care about the order of its terms,
// so a lane takes bytes that lie together, and x is loaded in the order that this makes.
// A byte becomes two numbers of 16 bits by one look-up in a table of all 256, of which each
// lane has its own copy in its own bank: one PRMT makes the address, one LDS reads. The scales
// are applied to the fp32 sums of each block, which is more exact than a rounded product.
//
// What a warp costs the path to shared memory, in cycles for each tile of 2 KB: 64 look-ups, 16
// to write and 16 to read the tile, 10 for the scales, 5 for the sums; with 16 warps 1780, where
// memory takes 1800 at 4.3 TB/s. A scheduler's four warps issue 1100 instructions for theirs.
// Measured: 2000, and as many where all tiles are the same, which L2 has.
//
// Log, bf16 nested on an H200, microseconds, plain / with PDL; reading takes 7.9 at 14336x4096,
// 3.3 at 4096x4096, 26.8 at 28672x8192. The first rows are of another machine:
//   14336x4096, M = 1  17.0 / 15.6  weights from global memory to registers, two tiles in
//                                   flight: 4.3 and 1.67 for each round of 16 warps
//                      16.6 / 15.6  the same with 250 instructions a tile in place of 315
//                                   (predicted 14: issue slots do not bound it)
//                      14.6 / 14.1  tiles by tensor maps, three slots a warp
//                      17.5 / 17.0  partial sums added up tile by tile behind barriers, scales
//                                   staged one by one (predicted 12: 16 threads' worth of
//                                   instructions before the first tile cost 4 cycles each, and
//                                   the barrier ties the warps together)
//                      13.2 / 12.7  the loop rolled, one slot asked for before the first small
//                                   loads are on their way (4000 cycles to the first tile
//                                   rather than 9000)
//                      13.2 / 12.6  scales staged four at a time: 300 cycles less for a tile, as
//                                   predicted, lost again by 1900 more before the first
//                      12.2 / 11.7  no divisions, no second path for x, all small loads first
//                      12.0 / 11.2  64 KB of each thread block's rows asked of L2 at once
//   Without scales the last but three took 1.7 less, without look-ups 1.6, without tiles 3.2, and
//   tiles alone 10.1: at 28672x8192 tiles alone take 31.5 of 38.
//   14336x4096, M = 1  12.1 / 11.4  where its outputs go found out while the first tile is on its
//                                   way rather than at the end; 32 KB ahead
//   28672x8192, M = 1  34.3 / 33.9  to 35.2 / 34.7 with 32 KB ahead: not where shares are large
//   The next slice of x brought to L1 ahead: nothing, 0.4 worse at M = 8. Warps without a slice in
//   the last turn sharing the others' tiles (4096x14336: 8 of 16, predicted 0.8 less): 0.6 more.
//   A fraction of the look-ups by 21 PRMT and shifts in place of 4 PRMT and 4 LDS: no change.
//   14336x4096, M = 8  19.1 / 18.3  to 13.2 / 12.7 by the same steps
//   From here on in turns with the state above, which is in brackets, on one machine:
//   14336x4096, M = 1  11.9 / 11.0  (12.6 / 11.5) scales copied without registers, and waited for
//                                   when the first tile is multiplied (predicted 0.6 less)
//               M = 8  12.8 / 11.9  (13.6 / 12.8)
//   28672x8192, M = 1  34.8 / 34.5  (35.8 / 35.1), M = 8 40.5 / 40.2 (42.8 / 42.3)
//   28672x8192, M = 1  34.6 / 34.2  what depends on the lane kept: 5 instructions of 281 less; 0.7
//                                   more at M = 8, where registers are spilled for it
//   Without multiplying that takes 9.2 / 8.7 at 14336x4096, with all tiles the same 11.3 / 11.6.
//   At 1.77 GHz the first tile was asked for at 2900 cycles, and came at 4700 to 6900: code that
//   runs for the first time takes about 10 cycles an instruction. The end takes 600.
//   Lost, beside 12.1 to 12.5 / 11.0 to 11.5: the rest of a share asked of L2 when the first small
//   loads are on their way 14.9 / 13.8 (predicted 0.4 less; tiles wait behind it); 64 KB ahead 13.0
//   / 11.9, none 12.2 / 12.3; the table before the predecessor is waited for 12.1 / 11.6; all slots
//   asked for at once 12.2 / 12.0, or when the first scales are there 12.7 / 11.7; an eighth of the
//   look-ups by PRMT 12.5 / 11.8 (predicted 1 less: instructions bound it as look-ups do).
//   The first tile asked for before the scales: 4096x4096, M = 1 5.7 / 5.1 for 5.8 / 5.4, but
//   14336x4096 12.2 / 11.1 and 4096x14336, M = 8 0.4 more.
//   A warpgroup that feeds the 16 warps (640 threads of 96 registers; one thread copies stages of
//   32 KB by a 3-D tensor map, two warps the scales, one adds up; predicted 10.5 / 9.8): 12.2 to
//   13.3 / 11.7 to 12.9, and 12.9 to 17.1 at M = 8. Rounds of 1600 to 2000 cycles with 220 to 240
//   instructions a tile, but the first stage is full at 4700 to 6400, as every role has code of its
//   own to be fetched and all warps wait for a stage's last tile; a warp that made scales took up
//   to 2200 cycles a stage, the one that added up 2700 at M = 8. Boxes of 1, 4 or 16 slices: the
//   same.
#pragma once

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/matmul/few_args.hpp"
#include "cuda/matmul/pairs.cuh"
#include "cuda/matmul/quarters.cuh"
#include "cuda/matmul/ring.cuh"
#include "cuda/matmul/staged_scales.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

// The rows of the weight that a thread block owns: shares differ by one row at most.
struct RowShare {
  int first;
  int count;
  __device__ __forceinline__ RowShare(const FewArgs &few, int block)
      : first(block * few.block_rows + min(block, few.more_rows)),
        count(few.block_rows + (block < few.more_rows)) {}
  __device__ __forceinline__ int tiles() const { return (count + kTileRows - 1) / kTileRows; }
};

// Asks L2 for the first weights, which may be done while the predecessor still writes.
template <class Arch>
__device__ __forceinline__ void prefetch_rows(const FewArgs &few, const RowShare &share) {
  if constexpr (Arch::kBulkPrefetch) {
    if (threadIdx.x != 0 || few.prefetch_bytes == 0) return;
    prefetch_l2<Arch>(few.matmul.packed + share.first * few.matmul.cols / 2,
                      static_cast<uint32_t>(few.prefetch_bytes));
  }
}

// The group of tiles that a thread block works on, and where the sums of its tiles go.
template <class Quarters>
struct TileGroup {
  static constexpr int kTilePartials = kTileRows * Quarters::kMaxM;
  int first;
  int end;
  float *partials;  // [tile][warp][row][row of x]

  // A warp's sums for the tile `tile` of the group.
  __device__ __forceinline__ float *of_warp(int tile, int warp) const {
    return partials + (tile * kFewWarps + warp) * kTilePartials;
  }
};

// An output of a group: what it takes to add up what the warps have, and to write it. All of it
// is known before the sums are there.
template <class T, class Quarters>
class Output {
  static constexpr uint32_t kMaxM = Quarters::kMaxM, kTilePartials = kTileRows * kMaxM;

 public:
  __device__ __forceinline__ Output(const FewArgs &few, const RowShare &share,
                                    const TileGroup<Quarters> &group, uint32_t index) {
    const MatmulArgs &args = few.matmul;
    const uint32_t tile = index / kTilePartials, within = index % kTilePartials;
    const uint32_t first_warp = few.tile_step == 1 ? 0 : tile % few.tile_step * few.together;
    const uint32_t m = within % kMaxM;
    const int row = (group.first + tile) * kTileRows + Quarters::row_at(within / kMaxM);
    there_ = (group.first + tile < group.end) & (m < args.m) & (row < share.count);
    if (!there_) return;
    partial_ = group.of_warp(tile, first_warp) + within;
    y_ = static_cast<T *>(args.y) + m * args.y_stride + share.first + row;
    if (args.bias != nullptr)
      start_ = to_float(static_cast<const T *>(args.bias)[share.first + row]);
  }

  // Always in the same order.
  __device__ __forceinline__ void write(int warps, float unit) const {
    if (!there_) return;
    float sums[4] = {};
    if (warps == kFewWarps) {
#pragma unroll
      for (int warp = 0; warp < kFewWarps; ++warp) sums[warp % 4] += partial_[warp * kTilePartials];
    } else {
#pragma unroll 1
      for (int warp = 0; warp < warps; ++warp) sums[0] += partial_[warp * kTilePartials];
    }
    const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    *y_ = from_float<T>(__fmaf_rn(sum, unit, start_));
  }

 private:
  const float *partial_;
  T *y_;
  float start_ = 0;
  bool there_;
};

// What one of a weight's thread blocks does.
template <class Arch, class T, bool Nested, class Quarters>
__device__ __forceinline__ void multiply_share(const FewArgs &few, int block) {
  constexpr int kMaxM = Quarters::kMaxM;
  extern __shared__ __align__(1024) uint8_t shared[];
  const MatmulArgs &args = few.matmul;
  const RowShare share(few, block);
  const int tiles = share.tiles();
  prefetch_rows<Arch>(few, share);
  pdl_wait<Arch>();

  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int pass = static_cast<int>(warp * few.inverse_together >> kInverseShift);
  const int first_slice = warp - pass * few.together;
  const int first_tile = pass < few.tile_step ? pass : tiles;
  TileRing<Arch, kMaxM> ring(few, shared, warp, share.first,
                             TileWalk(few, tiles, first_tile, first_slice));
  StagedScales<Arch, Nested> scales(few, shared, kFewLayout<Arch, kMaxM>.scale_barrier);
  ring.init();
  scales.init();
  // The small loads before the large ones, which delay them. All of them are ordinary loads:
  // the compiler may move a __ldg to before the wait.
  float offset = 0;
  if constexpr (Nested) offset = *args.nested_offset;
  Quarters quarters;
  quarters.load_x(args, first_slice);
  scales.stage_code();
  constexpr bool kKeep = Quarters::kKeepsLane;
  const PairTable table(shared, of_lane<kKeep>(threadIdx.x % 32 * 4));
  const int member = static_cast<int>(of_lane<kKeep>(threadIdx.x % 4));
  float unit = 1;
  uint32_t parity = 0;
#pragma unroll 1
  for (int first = 0; first < tiles; first += few.group_tiles, parity ^= 1) {
    const TileGroup<Quarters> group{
        first, min(first + few.group_tiles, tiles),
        reinterpret_cast<float *>(shared + kFewLayout<Arch, kMaxM>.partials)};
    const int first_row = first * kTileRows;
    scales.stage(share.first + first_row,
                 min(few.group_tiles * kTileRows, share.count - first_row));
    if (first == 0) {
      ring.fill();
      pdl_launch_dependents<Arch>();
      unit = build_pair_table<T>(few, shared);
    }
    scales.meet(first == 0);
#pragma unroll 1
    for (int slot = 1; slot < kFewLayout<Arch, kMaxM>.slots && first == 0; ++slot) ring.fill();
    // Now, while the first tile is on its way, and not when the last sums are there.
    Output<T, Quarters> output(few, share, group, threadIdx.x);
#pragma unroll 1
    for (int slice = first_slice; slice < few.slices; slice += kFewWarps) {
      if (slice != first_slice || first != 0) quarters.load_x(args, slice);
      auto place = scales.place(slice, first_tile, Quarters::row(0), member);
      float *partial = group.of_warp(first_tile, warp);
#pragma unroll 1
      for (int tile = first_tile; first + tile < group.end; tile += few.tile_step) {
        const auto pair = [&] {
          scales.wait(parity);
          const float2 found = scales.get(place, member, offset);
          scales.advance(place);
          return found;
        };
        quarters.add(ring.next(), table, pair, slice != first_slice, partial);
        __syncwarp();  // before the slot is written again
        ring.fill();
        partial += few.tile_step * kFewWarps * group.kTilePartials;
      }
    }
    __syncthreads();
    const uint32_t outputs = (group.end - group.first) * group.kTilePartials;
    for (uint32_t i = threadIdx.x; i < outputs;) {
      output.write(few.together, unit);
      i += kFewThreads;
      if (i < outputs) output = Output<T, Quarters>(few, share, group, i);
    }
    if (group.end < tiles) __syncthreads();
  }
}

// For cols that are a multiple of kQuarter, the weight and rows of x on 16-byte boundaries.
template <class Arch, class T, bool Nested, class Quarters>
__global__ void __launch_bounds__(kFewThreads, 1) matmul_few(const __grid_constant__ FewArgs few) {
  multiply_share<Arch, T, Nested, Quarters>(few, static_cast<int>(blockIdx.x));
}

// The same for several weights at once. Which of them is the same for a whole thread block, so that
// arguments are found through uniform registers and a thread needs none more.
template <class Arch, class T, bool Nested, class Quarters>
__global__ void __launch_bounds__(kFewThreads, 1)
    matmul_few_batch(const __grid_constant__ FewBatch batch) {
  const int block = static_cast<int>(blockIdx.x);
  int weight = 0;
#pragma unroll
  for (int i = 1; i < kFewBatch; ++i) weight += block >= batch.first_block[i];
  multiply_share<Arch, T, Nested, Quarters>(batch.of[weight], block - batch.first_block[weight]);
}

}  // namespace
}  // namespace nf4::cuda
