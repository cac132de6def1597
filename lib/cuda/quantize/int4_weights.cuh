// Quantize to integer weights: a warp computes the scales, zeros and codes of one group of 8 rows.
//
// Cost, 16-bit input, groups of 128: 2 bytes read and 0.52 written per weight, and about 16
// instructions: 3 for the range, 11 to scale, round, clamp and append a code. nf4.h's division is
// only needed for elements that a product leaves in doubt, one in 20000.
//
// Four lanes have a row. They read the group twice, for its range and for its codes, the second
// time from L1 or L2. A word of AWQ and of zeros has codes of 8 rows, which the warp transposes.
#pragma once

#include <cuda_runtime.h>

#include "core/round_int4.hpp"
#include "cuda/arch.cuh"
#include "cuda/element.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/quantize/int4_args.hpp"
#include "cuda/weight/int4_scale.cuh"

namespace nf4::cuda {
namespace {

constexpr unsigned kEveryLane = 0xffffffffu;
constexpr int kRowLanes = 4;

// Loads eight elements, of which `count` exist; the others are 0.
template <class T>
__device__ __forceinline__ void load_eight(const T *in, int64_t count, bool aligned,
                                           float (&x)[8]) {
  if (aligned) {
    T elements[8];
    const uint4 *vectors = reinterpret_cast<const uint4 *>(in);
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 2); ++i)
      reinterpret_cast<uint4 *>(elements)[i] = __ldg(vectors + i);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(elements[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = i < count ? to_float(in[i]) : 0.0f;
  }
}

// The range of a group's finite elements, for a group that has others.
template <class T>
__device__ __noinline__ Int4Range finite_range(const T *in, int64_t first, int64_t end,
                                               int64_t stride) {
  Int4Range range;
  for (int64_t k = first; k < end; k += stride)
    for (int64_t i = k; i < min(k + 8, end); ++i) range.add(to_float(in[i]));
  return range;
}

// Reduces over the lanes of a row.
__device__ __forceinline__ Int4Range row_range(Int4Range range) {
#pragma unroll
  for (int distance = 1; distance < kRowLanes; distance *= 2) {
    range.add(__shfl_xor_sync(kEveryLane, range.low, distance));
    range.add(__shfl_xor_sync(kEveryLane, range.high, distance));
  }
  return range;
}

__device__ __forceinline__ uint16_t round_scale(float scale, nf4_dtype dtype) {
  return int4_scale_bits(dtype == NF4_DTYPE_FP16 ? __half_as_ushort(__float2half_rn(scale))
                                                 : __bfloat16_as_ushort(__float2bfloat16_rn(scale)),
                         dtype);
}

// Makes the word of 8 rows of one column each from words of 8 columns of one row each. Among lanes
// 4 r + j, r = 0..7, the lane with r = i gets column i. Row r is in nibble r.
__device__ __forceinline__ uint32_t transpose(uint32_t word) {
  const int row = threadIdx.x % 32 / kRowLanes;
  constexpr uint32_t kLow[3] = {0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int shift = 4 << i;
    const uint32_t other = __shfl_xor_sync(kEveryLane, word, kRowLanes << i);
    word = (row >> i & 1) == 0 ? (word & kLow[i]) | (other & kLow[i]) << shift
                               : (word & ~kLow[i]) | (other & ~kLow[i]) >> shift;
  }
  return word;
}

// Reorders rows in order to AWQ's nibbles.
__device__ __forceinline__ uint32_t awq_word(uint32_t word) {
  uint32_t result = 0;
#pragma unroll
  for (int row = 0; row < kInt4PerWord; ++row)
    result |= (word >> (4 * row) & 15u) << (4 * awq_nibble(row));
  return result;
}

// Combines one code of each row into the word of 8 rows.
__device__ __forceinline__ uint32_t across_rows(uint32_t code) {
  uint32_t word = code << (threadIdx.x % 32 / kRowLanes * 4);
#pragma unroll
  for (int distance = kRowLanes; distance < 32; distance *= 2)
    word |= __shfl_xor_sync(kEveryLane, word, distance);
  return word;
}

// Reduces over the warps of a CTA, by row.
__device__ __forceinline__ Int4Range cta_range(Int4Range range) {
  __shared__ Int4Range ranges[kInt4QuantizeThreads / 32][kInt4PerWord];
  const int row = threadIdx.x % 32 / kRowLanes;
  ranges[threadIdx.x / 32][row] = range;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kInt4QuantizeThreads / 32; ++warp) {
    range.add(ranges[warp][row].low);
    range.add(ranges[warp][row].high);
  }
  return range;
}

// Turns elements of a group into codes.
struct Int4Encoder {
  float scale, inverse;
  uint32_t zero;
  bool fast;  // x * inverse is small enough for encode()

  __device__ __forceinline__ Int4Encoder(const Int4Range &range, float scale_, uint32_t zero_)
      : scale(scale_), zero(zero_) {
    inverse = divide_rn(1.0f, scale);
    fast = multiply_rn(fmaxf(range.high, -range.low), inverse) < 32.0f;
  }

  // Encodes with a product, whose error is below 2^-16. Returns false if that leaves open how an
  // element rounds, as it does for NaN.
  __device__ __forceinline__ bool encode(const float (&x)[8], uint32_t &word) const {
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: sums with it are integers
    constexpr float kSure = 0.5f - 0x1p-16f;
    bool sure = fast;
    word = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      const float quotient = multiply_rn(x[i], inverse);
      const float rounded = add_rn(quotient, kRounder);
      sure = sure && fabsf(add_rn(quotient, -add_rn(rounded, -kRounder))) <= kSure;
      const int code = __float_as_int(rounded) - __float_as_int(kRounder) + static_cast<int>(zero);
      word = word << 4 | static_cast<uint32_t>(min(max(code, 0), 15));
    }
    return sure;
  }
};

// Encodes with the division that nf4.h requires. It reads the elements again, so that they need no
// local memory.
template <class T>
__device__ __noinline__ uint32_t encode_slowly(const T *in, int64_t count, float scale,
                                               uint32_t zero) {
  uint32_t word = 0;
  for (int i = 0; i < min(count, int64_t{8}); ++i)
    word |= int4_encode(to_float(in[i]), scale, zero) << (4 * i);
  return word;
}

// The place of a warp: eight rows of a group, alone or, if the group is large, together with the
// other warps of its CTA. Neighbouring tiles have neighbouring rows, whose words and scales share
// sectors.
struct Int4QuantizePlace {
  int64_t g, octet;
  int64_t first;   // the lane's first 8 elements in the group
  int64_t stride;  // distance to its next elements
  int row;         // row within the eight

  __device__ __forceinline__ Int4QuantizePlace(const Int4QuantizeArgs &args) {
    constexpr int kWarps = kInt4QuantizeThreads / 32;
    const int warp = threadIdx.x / 32;
    const int64_t tile = args.cta_tiles ? int64_t{blockIdx.x} : int64_t{blockIdx.x} * kWarps + warp;
    const int64_t octets = int4_words(args.rows);
    g = tile / octets;
    octet = tile - g * octets;
    row = threadIdx.x % 32 / kRowLanes;
    first = ((args.cta_tiles ? warp : 0) * kRowLanes + threadIdx.x % kRowLanes) * 8;
    stride = (args.cta_tiles ? kWarps : 1) * kRowLanes * 8;
  }
};

// The range of a lane's row of the group.
template <class T>
__device__ __forceinline__ Int4Range group_range(const Int4QuantizeArgs &args, const T *in,
                                                 const Int4QuantizePlace &place) {
  Int4Range range;
#pragma unroll 4
  for (int64_t k = place.first; k < args.group_size; k += place.stride) {
    float x[8];
    load_eight(in + k, args.group_size - k, args.aligned, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      range.low = fminf(range.low, x[i]);
      range.high = fmaxf(range.high, x[i]);
    }
  }
  if (!is_finite(range.low) || !is_finite(range.high))
    range = finite_range(in, place.first, args.group_size, place.stride);
  range = row_range(range);
  return args.cta_tiles ? cta_range(range) : range;
}

// The codes of a group. All lanes of a warp make the same number of iterations, since they exchange
// words.
template <class T>
__device__ __forceinline__ void store_codes(const Int4QuantizeArgs &args, const T *in,
                                            const Int4QuantizePlace &place,
                                            const Int4Encoder &encoder) {
  const int64_t octets = int4_words(args.rows);
  const int64_t n = place.octet * 8 + place.row;
  const int64_t group = place.g * args.group_size;
  const int own = threadIdx.x % kRowLanes * 8;
  for (int64_t k = place.first; k - own < args.group_size; k += place.stride) {
    const int64_t left = args.group_size - k;
    uint32_t word = 0;
    if (left > 0) {
      float x[8];
      load_eight(in + k, left, args.aligned, x);
      if (!encoder.encode(x, word)) word = encode_slowly(in + k, left, encoder.scale, encoder.zero);
      if (left < 8) word &= (1u << (4 * left)) - 1;
    }
    if (args.layout == NF4_INT4_AWQ) {
      const uint32_t column = awq_word(transpose(word));
      if (place.row < left) args.packed[(group + k + place.row) * octets + place.octet] = column;
    } else if (n < args.rows && left > 0) {
      args.packed[int4_code(args.layout, args.rows, args.cols, n, group + k).word] = word;
    }
  }
}

template <class Arch, class T>
__global__ void __launch_bounds__(kInt4QuantizeThreads)
    quantize_int4(const __grid_constant__ Int4QuantizeArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const Int4QuantizePlace place(args);
  if (place.g >= args.groups) return;
  const int64_t n = place.octet * 8 + place.row;
  const bool has_row = n < args.rows;
  const T *const in =
      static_cast<const T *>(args.in) + (has_row ? n : 0) * args.cols + place.g * args.group_size;
  const Int4Range range = group_range(args, in, place);
  const uint16_t bits = round_scale(int4_exact_scale(range, args.symmetric), args.scales_dtype);
  const float scale = scale_to_float(args.scales_dtype == NF4_DTYPE_FP16, bits);
  const uint32_t zero = int4_zero_of(range, args.symmetric, scale);
  if (place.first == 0 && has_row)
    args.scales[int4_scale(args.layout, args.rows, args.groups, n, place.g)] = bits;
  if (args.zeros != nullptr) {
    const uint32_t word = across_rows(has_row ? zero : 0) - args.zero_offset * kInt4Ones;
    if (place.first == 0 && place.row == 0)
      args.zeros[int4_zero(args.layout, args.rows, args.groups, place.octet * 8, place.g).word] =
          args.layout == NF4_INT4_AWQ ? awq_word(word) : word;
  }
  store_codes(args, in, place, {range, scale, zero});
}

}  // namespace
}  // namespace nf4::cuda
