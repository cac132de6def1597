// The tile of a CTA in each layout of integer weights: the words that a lane loads, and the scale
// and zero of its codes. A lane has a run of 8 columns of each of kRows rows. The runs of kLanes
// lanes are a contiguous piece of out, which they store together.
#pragma once

#include <cuda_runtime.h>

#include "core/int4.hpp"
#include "cuda/dequant/int4_args.hpp"
#include "cuda/element.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/weight/int4_scale.cuh"

namespace nf4::cuda {
namespace {

constexpr unsigned kWholeWarp = 0xffffffffu;

// 2^23 plus a small integer, as a float: its bits are those of both, ORed. Differences of such
// numbers are exact.
__device__ __forceinline__ float shifted_integer(uint32_t integer) {
  return __uint_as_float(0x4b000000u | integer);
}

// The scale of a run, and 2^23 plus its zero.
struct ScaleAndZero {
  float scale, zero;

  __device__ __forceinline__ float value(uint32_t code) const {
    return multiply_rn(shifted_integer(code) - zero, scale);
  }
};

// Words that run along the columns, one per row.
template <int Rows>
struct RowWords {
  uint32_t words[Rows];

  __device__ __forceinline__ uint32_t code(int row, int i) const {
    return words[row] >> (4 * i) & 15u;
  }
  // Splits the same columns into vectors of 4: returns the first or second half of the columns that
  // `Lanes` lanes have.
  template <int Lanes>
  __device__ __forceinline__ RowWords half(int which) const {
    const int lane = threadIdx.x % Lanes;
    RowWords result;
#pragma unroll
    for (int row = 0; row < Rows; ++row)
      result.words[row] =
          __shfl_sync(kWholeWarp, words[row], which * (Lanes / 2) + lane / 2, Lanes) >>
          (lane % 2 * 16);
    return result;
  }
};

// The place of the CTA's tile in a weight whose tiles are ordered by columns, then rows.
struct TilePlace {
  uint32_t column_tile, row_tile;

  __device__ __forceinline__ explicit TilePlace(const Int4DequantArgs &args)
      : row_tile(args.tile_divisor.divide(blockIdx.x)) {
    column_tile = blockIdx.x - row_tile * args.column_tiles;
  }
};

// A lane has two rows: 8 bytes, since the words of one run lie side by side. A warp has 16 rows and
// 32 columns, a CTA 4 x 4 warps.
template <class Arch>
class GptqTile {
 public:
  static constexpr Int4Tiling kTiling = kGptqTiling;
  static constexpr int kRows = 2;
  static constexpr int kLanes = 4;

  __device__ __forceinline__ GptqTile(const Int4DequantArgs &args, CachePolicy policy) {
    const Int4View &weight = args.weight;
    const TilePlace place(args);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t run = place.column_tile * (kTiling.columns / 8) + warp / 4 * 4 + lane % 4;
    const int64_t row = int64_t{place.row_tile} * kTiling.rows + (warp % 4 * 16 + lane / 4 * kRows);
    whole_ = row < weight.rows && run * 8 < weight.cols;
    out_ = row * weight.cols + run / kLanes * (kLanes * 8);
    if (!whole_) return;
    const uint32_t *const packed = weight.packed + (run * weight.rows + row);
    const uint2 loaded = load_once<Arch>(reinterpret_cast<const uint2 *>(packed), policy);
    if (lane < kLanes && row + args.prefetch < weight.rows)
      prefetch_l2_sector(packed + args.prefetch);
    const int64_t group = args.group_divisor.divide(run / 8);
    scales_ =
        __ldg(reinterpret_cast<const uint32_t *>(weight.scales + (group * weight.rows + row)));
    zeros_ = kInt4SymmetricZeros;
    if (weight.zeros != nullptr)
      zeros_ = int4_zero_word(__ldg(weight.zeros + (group * int4_words(weight.rows) + row / 8)),
                              weight.zero_offset) >>
               (row % 8 * 4);
    words_ = {{loaded.x, loaded.y}};
  }
  template <int Vector>
  __device__ __forceinline__ RowWords<kRows> words(int half) const {
    return Vector == 8 ? words_ : words_.template half<kLanes>(half);
  }
  __device__ __forceinline__ bool has(int) const { return whole_; }
  __device__ __forceinline__ ScaleAndZero scale(const Int4View &weight, int row) const {
    return {scale_to_float(weight.fp16_scales, row == 0 ? scales_ & 0xffffu : scales_ >> 16),
            shifted_integer(zeros_ >> (4 * row) & 15u)};
  }
  // The place in out where the lanes' runs of a row begin.
  __device__ __forceinline__ int64_t out(const Int4View &weight, int row) const {
    return out_ + row * weight.cols;
  }

 private:
  RowWords<kRows> words_{};
  uint32_t scales_ = 0, zeros_ = 0;
  int64_t out_;
  bool whole_;
};

// Words that run along 8 rows, one per column; a lane has four of the rows.
struct ColumnWords {
  uint32_t words[8];

  __device__ __forceinline__ uint32_t code(int row, int i) const {
    return words[i] >> (4 * awq_nibble(row)) & 15u;
  }
};

// 32 words of each of 64 columns are loaded as whole lines, 16 bytes per thread, and transposed in
// shared memory. Word o of column k lies at place (o + 4 (k / 8)) % 32, so no access has a bank
// conflict. Then 8 lanes have the 8 runs of a row, and each word is read by two threads, for 4 rows
// each.
template <class Arch>
class AwqTile {
 public:
  static constexpr Int4Tiling kTiling = kAwqTiling;
  static constexpr int kRows = 4;
  static constexpr int kLanes = 8;

  __device__ __forceinline__ AwqTile(const Int4DequantArgs &args, CachePolicy policy) {
    __shared__ uint4 shared[kTiling.columns * kOctets / 4];
    const Int4View &weight = args.weight;
    const TilePlace place(args);
    const uint32_t octets = static_cast<uint32_t>(weight.rows / 8);
    const uint32_t first_octet = place.row_tile * kOctets;
    const int64_t first_column = int64_t{place.column_tile} * kTiling.columns;

    const uint32_t column = threadIdx.x / 8, quad = threadIdx.x % 8;
    uint4 loaded{};
    if (first_octet + quad * 4 < octets) {
      const uint32_t *const packed =
          weight.packed + ((first_column + column) * octets + first_octet + quad * 4);
      loaded = load_once<Arch>(reinterpret_cast<const uint4 *>(packed), policy);
      if (quad % 4 == 0 && first_octet + quad * 4 + args.prefetch / 8 < octets)
        prefetch_l2_sector(packed + args.prefetch / 8);
    }
    const uint32_t octet = first_octet + threadIdx.x / 8 % kOctets;
    half_ = threadIdx.x / (kTiling.threads / 2);
    whole_ = octet < octets;
    out_ = (int64_t{octet} * 8 + half_ * kRows) * weight.cols + first_column;
    if (whole_) {
      const int64_t group = args.group_divisor.divide(place.column_tile);
      scales_ = __ldg(reinterpret_cast<const uint2 *>(
          weight.scales + (group * weight.rows + (octet * 8 + half_ * kRows))));
      zeros_ = kInt4SymmetricZeros;
      if (weight.zeros != nullptr)
        zeros_ = __ldg(weight.zeros + (group * octets + octet)) >> (half_ * 8);
    }
    shared[column * 8 + (quad + column / 8) % 8] = loaded;
    __syncthreads();
    shared_ = reinterpret_cast<const uint32_t *>(shared);
  }
  template <int Vector>
  __device__ __forceinline__ ColumnWords words(int half) const {
    const uint32_t column = (half * kLanes + threadIdx.x % kLanes) * Vector;
    const uint32_t octet = threadIdx.x / 8 % kOctets;
    const uint32_t *const from = shared_ + column * kOctets + (octet + column / 8 * 4) % kOctets;
    ColumnWords result{};
#pragma unroll
    for (int i = 0; i < Vector; ++i) result.words[i] = from[i * kOctets] >> (half_ * 8);
    return result;
  }
  __device__ __forceinline__ bool has(int) const { return whole_; }
  __device__ __forceinline__ ScaleAndZero scale(const Int4View &weight, int row) const {
    const uint32_t pair = row < 2 ? scales_.x : scales_.y;
    return {scale_to_float(weight.fp16_scales, row % 2 == 0 ? pair & 0xffffu : pair >> 16),
            shifted_integer(zeros_ >> (4 * awq_nibble(row)) & 15u)};
  }
  __device__ __forceinline__ int64_t out(const Int4View &weight, int row) const {
    return out_ + row * weight.cols;
  }

 private:
  static constexpr uint32_t kOctets = kTiling.rows / 8;
  const uint32_t *shared_;
  uint2 scales_{};
  uint32_t zeros_ = 0, half_;
  int64_t out_;
  bool whole_;
};

// Words and groups continue from row to row, so a "row" is a strip of 64 columns here. A lane
// finishes the scale of one strip; shuffles pass it to the 8 lanes that have the strip.
template <class Arch>
class RowPackedTile {
 public:
  static constexpr Int4Tiling kTiling = kRowPackedTiling;
  static constexpr int kRows = 4;
  static constexpr int kLanes = 8;

  __device__ __forceinline__ RowPackedTile(const Int4DequantArgs &args, CachePolicy policy) {
    const uint32_t lane = threadIdx.x % 32;
    first_ = (blockIdx.x * (kTiling.threads / 32) + threadIdx.x / 32) * kStrips;
    left_ = args.strips - min(first_, args.strips);
    const uint32_t *const packed = args.weight.packed + (int64_t{first_} * 8 + lane);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (has(row)) words_.words[row] = load_once<Arch>(packed + row * 32, policy);
    if (lane < 2 * kRows && first_ + kStrips + args.prefetch / 8 < args.strips)
      prefetch_l2_sector(packed - lane + (lane * 16 + args.prefetch));
    scale_ = strip_scale(args, min(first_ + lane % kStrips, args.strips - 1));
  }
  template <int Vector>
  __device__ __forceinline__ RowWords<kRows> words(int half) const {
    return Vector == 8 ? words_ : words_.template half<kLanes>(half);
  }
  __device__ __forceinline__ bool has(int row) const { return own(row) < left_; }
  __device__ __forceinline__ ScaleAndZero scale(const Int4View &, int row) const {
    return {__shfl_sync(kWholeWarp, scale_.scale, own(row)),
            __shfl_sync(kWholeWarp, scale_.zero, own(row))};
  }
  __device__ __forceinline__ int64_t out(const Int4View &, int row) const {
    return (int64_t{first_} + own(row)) * kInt4StripColumns;
  }

 private:
  static constexpr int kStrips = kRows * 32 / kLanes;  // per warp

  // The index of the lane's strip among the warp's.
  static __device__ __forceinline__ uint32_t own(int row) {
    return row * (32 / kLanes) + threadIdx.x % 32 / kLanes;
  }
  static __device__ __forceinline__ ScaleAndZero strip_scale(const Int4DequantArgs &args,
                                                             uint32_t strip) {
    const Int4View &weight = args.weight;
    const uint32_t index = args.group_divisor.divide(strip);
    uint32_t zero = kInt4SymmetricZero;
    if (weight.zeros != nullptr) {
      const uint32_t row = args.groups_divisor.divide(index);
      const Int4Place place = int4_zero(NF4_INT4_COMPRESSED_TENSORS, weight.rows, weight.groups,
                                        row, index - int64_t{row} * weight.groups);
      zero = __ldg(weight.zeros + place.word) >> place.shift & 15u;
    }
    return {scale_to_float(weight.fp16_scales, __ldg(weight.scales + index)),
            shifted_integer(zero)};
  }

  RowWords<kRows> words_{};
  ScaleAndZero scale_;
  uint32_t first_, left_;
};

}  // namespace
}  // namespace nf4::cuda
