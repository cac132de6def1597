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
#pragma once

#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/pairs.cuh"
#include "cuda/matmul/scales.cuh"
#include "cuda/memory.cuh"
#include "cuda/mma.cuh"

namespace nf4::cuda {
namespace {

// Where a lane is in a fragment.
struct FragmentLane {
  int group;   // row of A, column of B
  int member;  // of the four lanes that share them
  __device__ __forceinline__ FragmentLane()
      : group(threadIdx.x % 32 / 4), member(threadIdx.x % 4) {}
};

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

// 8 elements of x as pairs; zeros where there are none.
template <class T>
__device__ __forceinline__ void load_pairs(const MatmulArgs &args, int64_t row, int64_t column,
                                           uint32_t *pairs) {
  uint4 v{};
  if (row < args.m && column < args.cols) {
    const T *x = static_cast<const T *>(args.x) + row * args.x_stride + column;
    if (args.x_vectors) {
      v = __ldg(reinterpret_cast<const uint4 *>(x));
    } else {
      const uint16_t *bits = reinterpret_cast<const uint16_t *>(x);
      // Rolled: code that is seldom needed should be short.
#pragma unroll 1
      for (int i = 7; i >= 0; --i) {
        v.w = v.w << 16 | v.z >> 16;
        v.z = v.z << 16 | v.y >> 16;
        v.y = v.y << 16 | v.x >> 16;
        v.x = v.x << 16 | bits[i];
      }
    }
  }
  pairs[0] = v.x;
  pairs[1] = v.y;
  pairs[2] = v.z;
  pairs[3] = v.w;
}

// D += 8 columns of two rows of the weight times x, for each of Tiles tiles of 8 rows of x.
template <class T, int Tiles>
__device__ __forceinline__ void multiply_word(PairTable table, uint32_t word, uint32_t word8,
                                              const uint32_t (&x)[Tiles][32], int first_pair,
                                              float (&d)[Tiles][4]) {
  const uint32_t a[4] = {table.pair<0>(word), table.pair<0>(word8), table.pair<1>(word),
                         table.pair<1>(word8)};
  const uint32_t b[4] = {table.pair<2>(word), table.pair<2>(word8), table.pair<3>(word),
                         table.pair<3>(word8)};
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
    multiply_add(T{}, d[i], a, x[i][first_pair], x[i][first_pair + 1]);
    multiply_add(T{}, d[i], b, x[i][first_pair + 2], x[i][first_pair + 3]);
  }
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

// A lane's part of a slice of a group. Offsets from the group's first row have 32 bits.
template <bool Nested>
class Source {
 public:
  Source() = default;
  // `column` is where the lane's weights begin, and it has the scales of a quarter.
  __device__ __forceinline__ Source(const MatmulArgs &args, RowGroup group, int64_t slice,
                                    int64_t column)
      : row_elements_(static_cast<int>(args.cols)), last_row_(static_cast<int>(group.count) - 1) {
    const int64_t first = group.first * args.cols;
    weights_ = args.packed + (first + column) / 2;
    const int64_t block = first >> args.blocksize_log2;
    const int64_t quarter = slice * kSlice + FragmentLane().member * (kSlice / 4);
    // Where there is no such column the scale counts for nothing, and must not be a NaN of
    // another row's.
    scale_column_ = static_cast<int>(first & ((int64_t{1} << args.blocksize_log2) - 1)) +
                    (quarter < args.cols ? static_cast<int>(quarter) : 0);
    absmax_ = static_cast<const uint8_t *>(args.absmax) + block * (Nested ? 1 : 4);
    if constexpr (Nested) {
      nested_absmax_ = args.nested_absmax + (block >> args.nested_blocksize_log2);
      nested_phase_ = static_cast<int>(block & ((int64_t{1} << args.nested_blocksize_log2) - 1));
    }
  }

  // Rows past the end are read as the last one, and their sums are not used.
  __device__ __forceinline__ int clamped(int row) const { return min(row, last_row_); }
  __device__ __forceinline__ const uint8_t *weights(int row) const {
    return weights_ + int64_t{row} * (row_elements_ / 2);
  }
  __device__ __forceinline__ FetchedScale<Nested> scale(const MatmulArgs &args, int row) const {
    const int block = (scale_column_ + row * row_elements_) >> args.blocksize_log2;
    if constexpr (Nested)
      return {__ldg(nested_absmax_ + ((nested_phase_ + block) >> args.nested_blocksize_log2)),
              __ldg(absmax_ + block)};
    else
      return {__ldg(reinterpret_cast<const float *>(absmax_) + block), 0};
  }

 private:
  const uint8_t *weights_;
  const uint8_t *absmax_;
  const float *nested_absmax_;
  int row_elements_;
  int last_row_;
  int scale_column_;
  int nested_phase_;
};

// ---- Up to 2 rows of x -------------------------------------------------------------------
//
// Each lane of four has its own 32 columns of a half slice. The 8 columns of B are 2 rows of x
// for each of the four, zero but in its columns, so that each lane's sums are of one block
// and it scales them itself.

template <class Arch, class T, bool Nested>
struct OwnRuns {
  static constexpr int kMaxM = 2;
  static constexpr int kStages = 2;
  static constexpr int kRuns = 2;  // in a slice

  struct Tile {
    uint4 words[kRuns][2];  // of rows group and group + 8
    FetchedScale<Nested> scales[2];
  };
  uint32_t x[1][32];

  static __device__ __forceinline__ int64_t column(int64_t slice) {
    return slice * kSlice + FragmentLane().member * 32;
  }

  __device__ __forceinline__ void load_x(const MatmulArgs &args, int64_t slice) {
    const FragmentLane lane;
    const int64_t row = lane.group / 2 == lane.member ? lane.group % 2 : args.m;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      load_pairs<T>(args, row, column(slice) + i / 4 * (kSlice / kRuns) + i % 4 * 8, x[0] + i * 4);
  }

  static __device__ __forceinline__ void load_words(const uint8_t *weights, int half,
                                                    int64_t columns, CachePolicy policy,
                                                    Tile &tile) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run)
      if (run * (kSlice / kRuns) < columns)
        tile.words[run][half] = load_streamed<Arch>(
            reinterpret_cast<const uint4 *>(weights + run * (kSlice / kRuns / 2)), policy);
  }

  // The sums of the tile's slice, for write().
  __device__ __forceinline__ float multiply(const Tile &tile, PairTable table, float scale,
                                            float scale8) const {
    const FragmentLane lane;
    float sums[4] = {};
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      float d[1][4] = {};
      const uint4 &w = tile.words[run][0], &w8 = tile.words[run][1];
      multiply_word<T>(table, w.x, w8.x, x, run * 16, d);
      multiply_word<T>(table, w.y, w8.y, x, run * 16 + 4, d);
      multiply_word<T>(table, w.z, w8.z, x, run * 16 + 8, d);
      multiply_word<T>(table, w.w, w8.w, x, run * 16 + 12, d);
      const int quarter = run * 2 + lane.member / 2;
      const float of_row = __shfl_sync(0xffffffffu, scale, quarter, 4);
      const float of_row8 = __shfl_sync(0xffffffffu, scale8, quarter, 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[k] = __fmaf_rn(k < 2 ? of_row : of_row8, d[0][k], sums[k]);
    }
    // Each of the four lanes adds up one: of row group + 8 * (member / 2) and of row
    // member % 2 of x.
    const bool odd = lane.member % 2, upper = lane.member / 2;
    const float low =
        (odd ? sums[1] : sums[0]) + __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[1], 1);
    const float high =
        (odd ? sums[3] : sums[2]) + __shfl_xor_sync(0xffffffffu, odd ? sums[2] : sums[3], 1);
    return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
  }

  // To partial[row][m], where `before` says that there is a sum already.
  __device__ __forceinline__ void add(const Tile &tile, PairTable table, float scale, float scale8,
                                      bool before, float *partial) const {
    const FragmentLane lane;
    float &to = partial[(lane.group + lane.member / 2 * 8) * kMaxM + lane.member % 2];
    const float sum = multiply(tile, table, scale, scale8);
    to = before ? to + sum : sum;
  }
};

// ---- Up to 8 or 16 rows of x -------------------------------------------------------------
//
// Four lanes share each quarter of a slice: 16 columns a lane.

template <class Arch, class T, bool Nested, int Tiles>
struct SharedRuns {
  static constexpr int kMaxM = 8 * Tiles;
  static constexpr int kStages = Tiles == 1 ? 2 : 1;  // as registers allow
  static constexpr int kRuns = 4;

  struct Tile {
    uint2 words[kRuns][2];
    FetchedScale<Nested> scales[2];
  };
  uint32_t x[Tiles][32];

  static __device__ __forceinline__ int64_t column(int64_t slice) {
    return slice * kSlice + FragmentLane().member * 16;
  }

  __device__ __forceinline__ void load_x(const MatmulArgs &args, int64_t slice) {
#pragma unroll
    for (int of_x = 0; of_x < Tiles; ++of_x)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        load_pairs<T>(args, of_x * 8 + FragmentLane().group,
                      column(slice) + i / 2 * (kSlice / kRuns) + i % 2 * 8, x[of_x] + i * 4);
  }

  static __device__ __forceinline__ void load_words(const uint8_t *weights, int half,
                                                    int64_t columns, CachePolicy policy,
                                                    Tile &tile) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run)
      if (run * (kSlice / kRuns) < columns)
        tile.words[run][half] = load_streamed<Arch>(
            reinterpret_cast<const uint2 *>(weights + run * (kSlice / kRuns / 2)), policy);
  }

  // To partial[row][m], where `before` says that there is a sum already.
  __device__ __forceinline__ void add(const Tile &tile, PairTable table, float scale, float scale8,
                                      bool before, float *partial) const {
    float sums[Tiles][4] = {};
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      float d[Tiles][4] = {};
      multiply_word<T>(table, tile.words[run][0].x, tile.words[run][1].x, x, run * 8, d);
      multiply_word<T>(table, tile.words[run][0].y, tile.words[run][1].y, x, run * 8 + 4, d);
      const float of_row = __shfl_sync(0xffffffffu, scale, run, 4);
      const float of_row8 = __shfl_sync(0xffffffffu, scale8, run, 4);
#pragma unroll
      for (int i = 0; i < Tiles; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          sums[i][k] = __fmaf_rn(k < 2 ? of_row : of_row8, d[i][k], sums[i][k]);
    }
    const FragmentLane lane;
#pragma unroll
    for (int i = 0; i < Tiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 &to = *reinterpret_cast<float2 *>(partial + (lane.group + half * 8) * kMaxM + i * 8 +
                                                 lane.member * 2);
        const float2 sum{sums[i][half * 2], sums[i][half * 2 + 1]};
        to = before ? float2{to.x + sum.x, to.y + sum.y} : sum;
      }
  }
};

// ---- The kernel --------------------------------------------------------------------------

// A warp's way through slices of groups: kStages tiles are in flight.
template <class Arch, bool Nested, class Runs>
class Walk {
 public:
  __device__ __forceinline__ explicit Walk(const MatmulArgs &args)
      : args_(args), step_(args.tile_step), policy_(evict_first<Arch>()) {}

  // Starts the loads of a slice, from the tile `first_tile` on.
  __device__ __forceinline__ void start(RowGroup group, int64_t slice, int first_tile) {
    tiles_ = tiles_of(group.count);
    tile_ = first_tile;
    const int64_t column = Runs::column(slice);
    columns_ = args_.cols - column;
    source_ = Source<Nested>(args_, group, slice, min(column, args_.cols));
#pragma unroll
    for (int i = 0; i < Runs::kStages; ++i) {
      stages_[i] = {};
      load(tile_ + i * step_, stages_[i]);
    }
    runs_.load_x(args_, slice);
  }

  // Puts its sums into the warp's partial sums, where `before` says that there are some.
  __device__ __forceinline__ void finish(PairTable table, const float *code, float offset,
                                         bool before, float *partials) {
    constexpr int kTilePartials = kTileRows * Runs::kMaxM;
    float *const own = partials + threadIdx.x / 32 * kTilePartials;
#pragma unroll 1
    for (; tile_ < tiles_; tile_ += Runs::kStages * step_) {
#pragma unroll
      for (int i = 0; i < Runs::kStages; ++i) {
        const int tile = tile_ + i * step_;
        if (tile < tiles_) {
          const auto &scales = stages_[i].scales;
          runs_.add(stages_[i], table, finish_scale(scales[0], code, offset),
                    finish_scale(scales[1], code, offset), before,
                    own + tile * kFewWarps * kTilePartials);
        }
        load(tile + Runs::kStages * step_, stages_[i]);
      }
    }
  }

 private:
  __device__ __forceinline__ void load(int tile, typename Runs::Tile &into) {
    if (tile >= tiles_) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = source_.clamped(tile * kTileRows + FragmentLane().group + half * 8);
      Runs::load_words(source_.weights(row), half, columns_, policy_, into);
      into.scales[half] = source_.scale(args_, row);
    }
  }

  const MatmulArgs &args_;
  const int step_;
  const CachePolicy policy_;
  int tiles_;
  int tile_;
  int64_t columns_;  // of the matrix from the lane's first one on
  Source<Nested> source_;
  typename Runs::Tile stages_[Runs::kStages];
  Runs runs_;
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

// For cols that are a multiple of a run, rows of the weight on 16-byte boundaries.
template <class Arch, class T, bool Nested, class Runs>
__global__ void __launch_bounds__(kFewThreads, 1)
    matmul_few(const __grid_constant__ MatmulArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const RowShare share(args);
  prefetch_rows<Arch>(args, share);
  wait_for_predecessor<Arch>();
  start_dependents<Arch>();
  float *const code = reinterpret_cast<float *>(shared + kPairTableBytes);
  float *const partials = reinterpret_cast<float *>(shared + kFewFixedBytes);
  const PairTable table(shared);
  const WarpShare warp(args);
  Walk<Arch, Nested, Runs> walk(args);
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
    write_group<T, Runs::kMaxM>(args, group, factor, partials);
    __syncthreads();
  }
}

}  // namespace
}  // namespace nf4::cuda
