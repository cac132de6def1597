// The tile of a warp in each layout of integer weights: which words a lane loads, and what scale
// and zero its codes have. In every layout 8 lanes hold a strip: 64 columns of a row, whose values
// are a contiguous piece of out. The four octets of lanes have different strips.
#pragma once

#include <cuda_runtime.h>

#include "core/int4.hpp"
#include "cuda/dequant/int4_args.hpp"
#include "cuda/element.cuh"
#include "cuda/ptx/memory.cuh"

namespace nf4::cuda {
namespace {

constexpr unsigned kWholeWarp = 0xffffffffu;

__device__ __forceinline__ float int4_scale_to_float(uint32_t bits, bool fp16) {
  return fp16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits)))
              : __uint_as_float(bits << 16);
}

// 2^23 + a small integer, as a float: the bits of both, one over the other. Differences of such
// numbers are exact.
__device__ __forceinline__ float shifted_integer(uint32_t integer) {
  return __uint_as_float(0x4b000000u | integer);
}

// The scale of a strip, and 2^23 + its zero.
struct ScaleAndZero {
  float scale, zero;

  __device__ __forceinline__ float value(uint32_t code) const {
    return multiply_rn(shifted_integer(code) - zero, scale);
  }
};

// Words that run along the columns.
template <int Strips>
struct RowWords {
  uint32_t words[Strips];

  __device__ __forceinline__ uint32_t code(int strip, int i) const {
    return words[strip] >> (4 * i) & 15u;
  }
  // The strips in vectors of 4 columns: this lane's of the first or second half of its strips.
  __device__ __forceinline__ RowWords half(int which) const {
    const int lane = threadIdx.x % 8;
    RowWords result;
#pragma unroll
    for (int strip = 0; strip < Strips; ++strip)
      result.words[strip] =
          __shfl_sync(kWholeWarp, words[strip], which * 4 + lane / 2, 8) >> (lane % 2 * 16);
    return result;
  }
};

// Words that run along 8 rows, one a column.
struct ColumnWords {
  uint32_t words[8];

  __device__ __forceinline__ uint32_t code(int row, int i) const {
    return words[i] >> (4 * awq_nibble(row)) & 15u;
  }
  __device__ __forceinline__ ColumnWords half(int which) const {
    const int lane = threadIdx.x % 8;
    ColumnWords result{};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t first = __shfl_sync(kWholeWarp, words[i], which * 4 + lane / 2, 8);
      const uint32_t second = __shfl_sync(kWholeWarp, words[i + 4], which * 4 + lane / 2, 8);
      result.words[i] = lane % 2 == 0 ? first : second;
    }
    return result;
  }
};

// Where a warp's tile is in a weight whose words do not run from row to row: so many rows, 64
// columns; tiles are in the order of columns.
struct TilePlace {
  uint32_t strip, row_tile;

  __device__ __forceinline__ TilePlace(const Int4DequantArgs &args, uint32_t tile)
      : row_tile(args.strip_divisor.divide(tile)) {
    strip = tile - row_tile * args.strips;
  }
};

// A lane has a run of each of four rows: 16 bytes, for words of one run lie side by side.
template <class Arch>
class GptqTile {
 public:
  static constexpr int kStrips = 4;  // of a lane
  RowWords<kStrips> words;

  __device__ __forceinline__ GptqTile(const Int4DequantArgs &args, uint32_t tile,
                                      CachePolicy policy) {
    const Int4View &weight = args.weight;
    const TilePlace place(args, tile);
    const int lane = threadIdx.x % 32;
    const int64_t row = int64_t{place.row_tile} * kGptqTileRows + lane / 8 * 4;
    whole_ = row < weight.rows;
    const int64_t near = whole_ ? row : 0;
    const int64_t run = int64_t{place.strip} * 8 + lane % 8;
    const uint4 loaded = load_once<Arch>(
        reinterpret_cast<const uint4 *>(weight.packed + (run * weight.rows + near)), policy);
    const int64_t group = args.group_divisor.divide(place.strip);
    scales_ = __ldg(reinterpret_cast<const uint2 *>(weight.scales + (group * weight.rows + near)));
    zeros_ =
        weight.zeros == nullptr
            ? 0x8888u
            : __ldg(weight.zeros + (group * int4_words(weight.rows) + near / 8)) >> (near % 8 * 4);
    out_ = row * weight.cols + int64_t{place.strip} * kInt4StripColumns;
    words = {{loaded.x, loaded.y, loaded.z, loaded.w}};
  }
  __device__ __forceinline__ bool has(int) const { return whole_; }
  __device__ __forceinline__ ScaleAndZero scale(const Int4View &weight, int strip) const {
    const uint32_t pair = strip < 2 ? scales_.x : scales_.y;
    return {int4_scale_to_float(strip % 2 == 0 ? pair & 0xffffu : pair >> 16, weight.fp16_scales),
            shifted_integer(int4_zero_word(zeros_, weight.zero_offset) >> (4 * strip) & 15u)};
  }
  // Of a strip, in elements of out.
  __device__ __forceinline__ int64_t out(const Int4View &weight, int strip) const {
    return out_ + strip * weight.cols;
  }

 private:
  uint2 scales_;
  uint32_t zeros_;
  int64_t out_;
  bool whole_;
};

// A lane has a run of each of 8 rows, as 8 words of one column each.
template <class Arch>
class AwqTile {
 public:
  static constexpr int kStrips = 8;
  ColumnWords words;

  __device__ __forceinline__ AwqTile(const Int4DequantArgs &args, uint32_t tile, CachePolicy) {
    const Int4View &weight = args.weight;
    const TilePlace place(args, tile);
    const int lane = threadIdx.x % 32;
    const int64_t octets = weight.rows / 8;
    const int64_t octet = int64_t{place.row_tile} * (kAwqTileRows / 8) + lane / 8;
    whole_ = octet < octets;
    const int64_t near = whole_ ? octet : 0;
    const int64_t column = int64_t{place.strip} * kInt4StripColumns;
    const uint32_t *packed = weight.packed + ((column + lane % 8 * 8) * octets + near);
#pragma unroll
    for (int i = 0; i < 8; ++i) words.words[i] = __ldg(packed + i * octets);
    const int64_t group = args.group_divisor.divide(place.strip);
    scales_ =
        __ldg(reinterpret_cast<const uint4 *>(weight.scales + (group * weight.rows + near * 8)));
    zeros_ = weight.zeros == nullptr ? 0x88888888u : __ldg(weight.zeros + (group * octets + near));
    out_ = octet * 8 * weight.cols + column;
  }
  __device__ __forceinline__ bool has(int) const { return whole_; }
  __device__ __forceinline__ ScaleAndZero scale(const Int4View &weight, int strip) const {
    const uint32_t pairs[4] = {scales_.x, scales_.y, scales_.z, scales_.w};
    const uint32_t pair = pairs[strip / 2];
    return {int4_scale_to_float(strip % 2 == 0 ? pair & 0xffffu : pair >> 16, weight.fp16_scales),
            shifted_integer(int4_zero_word(zeros_, weight.zero_offset) >> (4 * awq_nibble(strip)) &
                            15u)};
  }
  __device__ __forceinline__ int64_t out(const Int4View &weight, int strip) const {
    return out_ + strip * weight.cols;
  }

 private:
  uint4 scales_;
  uint32_t zeros_;
  int64_t out_;
  bool whole_;
};

// Words, strips and groups all run on from row to row. A lane finishes the scale of one strip;
// shuffles hand it to the octet that has the strip.
template <class Arch>
class RowPackedTile {
 public:
  static constexpr int kStrips = 4;
  static_assert(kStrips * 4 == kRowPackedTileStrips);
  RowWords<kStrips> words;

  __device__ __forceinline__ RowPackedTile(const Int4DequantArgs &args, uint32_t tile,
                                           CachePolicy policy) {
    const int lane = threadIdx.x % 32;
    first_ = tile * kRowPackedTileStrips;
    left_ = args.strips - first_;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
      words.words[strip] =
          has(strip) ? load_once<Arch>(
                           args.weight.packed + int64_t{first_} * 8 + (strip * 32 + lane), policy)
                     : 0;
    scale_ = strip_scale(args, min(first_ + lane % kRowPackedTileStrips, args.strips - 1));
  }
  __device__ __forceinline__ bool has(int strip) const {
    return strip * 4 + threadIdx.x % 32 / 8 < left_;
  }
  __device__ __forceinline__ ScaleAndZero scale(const Int4View &, int strip) const {
    const int lane = strip * 4 + threadIdx.x % 32 / 8;
    return {__shfl_sync(kWholeWarp, scale_.scale, lane),
            __shfl_sync(kWholeWarp, scale_.zero, lane)};
  }
  __device__ __forceinline__ int64_t out(const Int4View &, int strip) const {
    return (int64_t{first_} + (strip * 4 + threadIdx.x % 32 / 8)) * kInt4StripColumns;
  }

 private:
  static __device__ __forceinline__ ScaleAndZero strip_scale(const Int4DequantArgs &args,
                                                             uint32_t strip) {
    const Int4View &weight = args.weight;
    const uint32_t index = args.group_divisor.divide(strip);
    uint32_t zero = kInt4SymmetricZero;
    if (weight.zeros != nullptr) {
      const uint32_t row = args.groups_divisor.divide(index);
      const Int4Place place = int4_zero(NF4_INT4_COMPRESSED_TENSORS, weight.rows, weight.groups,
                                        row, index - int64_t{row} * weight.groups);
      zero =
          int4_zero_word(__ldg(weight.zeros + place.word), weight.zero_offset) >> place.shift & 15u;
    }
    return {int4_scale_to_float(__ldg(weight.scales + index), weight.fp16_scales),
            shifted_integer(zero)};
  }

  ScaleAndZero scale_;
  uint32_t first_, left_;
};

}  // namespace
}  // namespace nf4::cuda
