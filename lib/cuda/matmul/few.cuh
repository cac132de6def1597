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
  __device__ __forceinline__ explicit RowShare(int64_t rows) {
    const int64_t each = rows / gridDim.x, more = rows % gridDim.x;
    first = blockIdx.x * each + min(int64_t{blockIdx.x}, more);
    count = each + (blockIdx.x < more);
  }
};

__device__ __forceinline__ int tiles_of(int64_t rows) {
  return static_cast<int>((rows + kTileRows - 1) / kTileRows);
}

// 8 elements of x as pairs; zeros where there are none.
template <class T>
__device__ __forceinline__ void load_x(const MatmulArgs &args, int64_t row, int64_t column,
                                       uint32_t *pairs) {
  uint4 v{};
  if (row < args.m && column < args.cols) {
    const T *x = static_cast<const T *>(args.x) + row * args.x_stride + column;
    if (args.x_vectors) {
      v = __ldg(reinterpret_cast<const uint4 *>(x));
    } else {
      T elements[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) elements[i] = x[i];
      memcpy(&v, elements, sizeof v);
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

// ---- Up to 2 rows of x -------------------------------------------------------------------
//
// Each lane of four has its own 32 columns of a half slice, which lie in one block of any
// size. The 8 columns of B are 2 rows of x for each of the four, zero but in its columns, so
// that each lane's sums are of its own block and it scales them itself.

template <class Arch, class T, bool Nested>
struct OwnRuns {
  static constexpr int kMaxM = 2;
  static constexpr int kRuns = 2;  // in a slice
  uint32_t x[1][32];

  struct Tile {
    uint4 words[kRuns][2];  // of rows group and group + 8
    FetchedScale<Nested> scales[kRuns][2];
  };

  static __device__ __forceinline__ int64_t column(int64_t slice, int run) {
    return slice * kSlice + run * (kSlice / kRuns) + FragmentLane().member * 32;
  }

  __device__ __forceinline__ void load_slice(const MatmulArgs &args, int64_t slice) {
    const FragmentLane lane;
    const bool own = lane.group / 2 == lane.member;
#pragma unroll
    for (int run = 0; run < kRuns; ++run)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        load_x<T>(args, own ? lane.group % 2 : args.m, column(slice, run) + i * 8,
                  x[0] + run * 16 + i * 4);
  }

  static __device__ __forceinline__ void load_tile(const MatmulArgs &args, const int64_t (&rows)[2],
                                                   int64_t slice, CachePolicy policy, Tile &tile) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int64_t k = column(slice, run);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t element = rows[i] * args.cols + (k < args.cols ? k : 0);
        tile.words[run][i] =
            load_streamed<Arch>(reinterpret_cast<const uint4 *>(args.packed + element / 2), policy);
        tile.scales[run][i] = fetch_scale<Nested>(args, element >> args.blocksize_log2);
      }
    }
  }

  // The sums of the tile's slice go to partial[m][row].
  __device__ __forceinline__ void multiply(const Tile &tile, PairTable table, const float *code,
                                           float offset, float *partial) const {
    float sums[4] = {};
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      float d[1][4] = {};
      const uint4 &w = tile.words[run][0], &w8 = tile.words[run][1];
      multiply_word<T>(table, w.x, w8.x, x, run * 16, d);
      multiply_word<T>(table, w.y, w8.y, x, run * 16 + 4, d);
      multiply_word<T>(table, w.z, w8.z, x, run * 16 + 8, d);
      multiply_word<T>(table, w.w, w8.w, x, run * 16 + 12, d);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = finish_scale(tile.scales[run][i], code, offset);
        sums[2 * i] = __fmaf_rn(scale, d[0][2 * i], sums[2 * i]);
        sums[2 * i + 1] = __fmaf_rn(scale, d[0][2 * i + 1], sums[2 * i + 1]);
      }
    }
    add(sums, partial);
  }

  // Each of the four lanes adds up one of the sums: of row group + 8 * (member / 2), and of
  // row member % 2 of x.
  static __device__ __forceinline__ void add(const float (&sums)[4], float *partial) {
    const FragmentLane lane;
    const bool odd = lane.member % 2, upper = lane.member / 2;
    const float low =
        (odd ? sums[1] : sums[0]) + __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[1], 1);
    const float high =
        (odd ? sums[3] : sums[2]) + __shfl_xor_sync(0xffffffffu, odd ? sums[2] : sums[3], 1);
    const float sum = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
    partial[lane.member % 2 * kTileRows + lane.group + 8 * (lane.member / 2)] += sum;
  }
};

// ---- Up to 8 or 16 rows of x -------------------------------------------------------------
//
// Four lanes share each run of 64 columns, which lies in one block: 16 columns a lane.

template <class Arch, class T, bool Nested, int Tiles>
struct SharedRuns {
  static constexpr int kMaxM = 8 * Tiles;
  static constexpr int kRuns = 4;
  uint32_t x[Tiles][32];

  struct Tile {
    uint2 words[kRuns][2];
    FetchedScale<Nested> scales[2];  // of the run whose number is the lane's
  };

  static __device__ __forceinline__ int64_t column(int64_t slice, int run) {
    return slice * kSlice + run * (kSlice / kRuns) + FragmentLane().member * 16;
  }

  __device__ __forceinline__ void load_slice(const MatmulArgs &args, int64_t slice) {
#pragma unroll
    for (int i = 0; i < Tiles; ++i)
#pragma unroll
      for (int run = 0; run < kRuns; ++run)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          load_x<T>(args, i * 8 + FragmentLane().group, column(slice, run) + half * 8,
                    x[i] + run * 8 + half * 4);
  }

  static __device__ __forceinline__ void load_tile(const MatmulArgs &args, const int64_t (&rows)[2],
                                                   int64_t slice, CachePolicy policy, Tile &tile) {
    const int64_t own = slice * kSlice + FragmentLane().member * (kSlice / kRuns);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = rows[i] * args.cols;
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const int64_t k = column(slice, run);
        tile.words[run][i] = load_streamed<Arch>(
            reinterpret_cast<const uint2 *>(args.packed + (row + (k < args.cols ? k : 0)) / 2),
            policy);
      }
      tile.scales[i] =
          fetch_scale<Nested>(args, (row + (own < args.cols ? own : 0)) >> args.blocksize_log2);
    }
  }

  __device__ __forceinline__ void multiply(const Tile &tile, PairTable table, const float *code,
                                           float offset, float *partial) const {
    const float scale = finish_scale(tile.scales[0], code, offset);
    const float scale8 = finish_scale(tile.scales[1], code, offset);
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
      for (int k = 0; k < 4; ++k)
        partial[(i * 8 + lane.member * 2 + k % 2) * kTileRows + lane.group + k / 2 * 8] +=
            sums[i][k];
  }
};

// ---- The kernel --------------------------------------------------------------------------

// Which slices and tiles a warp takes: with fewer slices than warps, several warps share a
// slice's tiles; with more, a warp takes another slice after its first.
struct WarpShare {
  int64_t slices;
  int64_t slice;
  int first_tile;
  int tile_step;

  __device__ __forceinline__ explicit WarpShare(int64_t cols)
      : slices((cols + kSlice - 1) / kSlice) {
    const int warp = threadIdx.x / 32;
    const int together = static_cast<int>(min(slices, int64_t{kFewWarps}));
    tile_step = kFewWarps / together;
    first_tile = warp / together;
    slice = first_tile < tile_step ? warp % together : slices;
  }
};

// Rows of the weight whose partial sums shared memory holds at a time.
struct RowGroup {
  int64_t first;
  int64_t count;
};

// A warp's way through a group: two tiles are in flight while a third is multiplied.
template <class Arch, class Runs>
class Walk {
 public:
  __device__ __forceinline__ explicit Walk(const MatmulArgs &args)
      : args_(args), share_(args.cols), policy_(evict_first<Arch>()) {}

  // Starts the loads of the first slice.
  __device__ __forceinline__ void start(RowGroup group) {
    group_ = group;
    tiles_ = tiles_of(group.count);
    slice_ = share_.slice;
    if (slice_ < share_.slices) start_slice();
  }

  // Adds the sums of the group to the warp's partial sums.
  __device__ __forceinline__ void finish(PairTable table, const float *code, float offset,
                                         float *partials) {
    constexpr int kTilePartials = kTileRows * Runs::kMaxM;
    float *const own = partials + threadIdx.x / 32 * kTilePartials;
    const auto multiply = [&](int tile, const typename Runs::Tile &of) {
      if (tile < tiles_)
        runs_.multiply(of, table, code, offset, own + tile * kFewWarps * kTilePartials);
    };
    while (slice_ < share_.slices) {
      const int step = share_.tile_step;
#pragma unroll 1
      for (int tile = share_.first_tile; tile < tiles_; tile += 2 * step) {
        multiply(tile, even_);
        load(tile + 2 * step, even_);
        multiply(tile + step, odd_);
        load(tile + 3 * step, odd_);
      }
      slice_ += kFewWarps;
      if (slice_ < share_.slices) start_slice();
    }
  }

 private:
  __device__ __forceinline__ void start_slice() {
    load(share_.first_tile, even_);
    load(share_.first_tile + share_.tile_step, odd_);
    runs_.load_slice(args_, slice_);
  }

  __device__ __forceinline__ void load(int tile, typename Runs::Tile &into) {
    if (tile >= tiles_) return;
    // Rows past the end are read as the last one, and their sums are not used.
    const int64_t last = group_.first + group_.count - 1;
    const int64_t row = group_.first + tile * kTileRows + FragmentLane().group;
    const int64_t rows[2] = {min(row, last), min(row + 8, last)};
    Runs::load_tile(args_, rows, slice_, policy_, into);
  }

  const MatmulArgs &args_;
  const WarpShare share_;
  const CachePolicy policy_;
  RowGroup group_;
  int tiles_;
  int64_t slice_;
  typename Runs::Tile even_, odd_;
  Runs runs_;
};

// Adds up what the warps have, always in the same order, and writes y.
template <class T, int kMaxM>
__device__ __forceinline__ void write_group(const MatmulArgs &args, RowGroup group, float factor,
                                            const float *partials) {
  const T *bias = static_cast<const T *>(args.bias);
  const int m = static_cast<int>(args.m);
  const int rows = static_cast<int>(group.count);
  for (int i = threadIdx.x; i < rows * m; i += kFewThreads) {
    const int row = i % rows, of_x = i / rows;
    const float *partial = partials + row / kTileRows * kFewWarps * kTileRows * kMaxM +
                           of_x * kTileRows + row % kTileRows;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kFewWarps; ++warp) sum += partial[warp * kTileRows * kMaxM];
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
  const RowShare share(args.rows);
  prefetch_rows<Arch>(args, share);
  wait_for_predecessor<Arch>();
  start_dependents<Arch>();
  const int64_t group_rows = int64_t{args.group_tiles} * kTileRows;
  Walk<Arch, Runs> walk(args);
  RowGroup group{share.first, min(group_rows, share.count)};
  walk.start(group);

  float *const code = reinterpret_cast<float *>(shared + kPairTableBytes);
  float *const partials = reinterpret_cast<float *>(shared + kFewFixedBytes);
  const float factor = build_pair_table<T, kFewThreads>(args.codebook, args.format, shared);
  const float offset = share_scale_code<Nested>(args, code);
  const PairTable table(shared);
  const int group_partials = args.group_tiles * kFewWarps * kTileRows * Runs::kMaxM;
  for (int64_t left = share.count; left > 0;) {
    for (int i = threadIdx.x; i < group_partials; i += kFewThreads) partials[i] = 0.0f;
    __syncthreads();
    walk.finish(table, code, offset, partials);
    __syncthreads();
    write_group<T, Runs::kMaxM>(args, group, factor, partials);
    left -= group.count;
    group = {group.first + group.count, min(group_rows, left)};
    if (left > 0) walk.start(group);
    __syncthreads();
  }
}

}  // namespace
}  // namespace nf4::cuda
