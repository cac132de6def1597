// Quantize to integer weights: scales, zeros and codes of one group of 8 rows a warp.
//
// Cost, 16-bit input, groups of 128: 2 bytes read and 0.52 written per weight, and about 25
// instructions, half of them the division that nf4.h asks for, so instructions bound it.
//
// Four lanes have a row. They read the group twice, for its range and for its codes, the second
// time from L1 or L2. A word of AWQ and of zeros has codes of 8 rows, which the warp transposes.
#pragma once

#include <cuda_runtime.h>

#include "core/round_int4.hpp"
#include "cuda/element.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/quantize/int4_args.hpp"

namespace nf4::cuda {
namespace {

constexpr unsigned kEveryLane = 0xffffffffu;
constexpr int kRowLanes = 4;

// Eight elements, of which there are `count`; the others are 0.
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

// Among the lanes of a row.
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

__device__ __forceinline__ float scale_of_bits(uint16_t bits, nf4_dtype dtype) {
  return dtype == NF4_DTYPE_FP16 ? __half2float(__ushort_as_half(bits))
                                 : __uint_as_float(uint32_t{bits} << 16);
}

// The word of 8 rows of one column each, from words of 8 columns of one row each: of lanes 4 r + j,
// r = 0..7, the one with r = i gets column i. Row r is in nibble r.
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

// From rows in order to AWQ's nibbles.
__device__ __forceinline__ uint32_t awq_word(uint32_t word) {
  uint32_t result = 0;
#pragma unroll
  for (int row = 0; row < kInt4PerWord; ++row)
    result |= (word >> (4 * row) & 15u) << (4 * awq_nibble(row));
  return result;
}

// One code of each row into the word of 8.
__device__ __forceinline__ uint32_t across_rows(uint32_t code) {
  uint32_t word = code << (threadIdx.x % 32 / kRowLanes * 4);
#pragma unroll
  for (int distance = kRowLanes; distance < 32; distance *= 2)
    word |= __shfl_xor_sync(kEveryLane, word, distance);
  return word;
}

template <class Arch, class T>
__global__ void __launch_bounds__(kInt4QuantizeThreads)
    quantize_int4(const __grid_constant__ Int4QuantizeArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const int64_t warp = int64_t{blockIdx.x} * (kInt4QuantizeThreads / 32) + threadIdx.x / 32;
  if (warp >= args.warps) return;
  // Neighbouring warps have neighbouring rows, whose words and scales share sectors.
  const int64_t octets = int4_words(args.rows);
  const int64_t g = warp / octets;
  const int64_t octet = warp - g * octets;
  const int lane = threadIdx.x % 32 % kRowLanes;
  const int64_t n = octet * 8 + threadIdx.x % 32 / kRowLanes;
  const bool has_row = n < args.rows;
  const int64_t first = g * args.group_size;  // column
  const T *const in = static_cast<const T *>(args.in) + (has_row ? n : 0) * args.cols + first;

  Int4Range range;
#pragma unroll 4
  for (int64_t k = lane * 8; k < args.group_size; k += kRowLanes * 8) {
    float x[8];
    load_eight(in + k, args.group_size - k, args.aligned, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) range.add(x[i]);
  }
  range = row_range(range);
  const uint16_t scale_bits =
      round_scale(int4_exact_scale(range, args.symmetric), args.scales_dtype);
  const float scale = scale_of_bits(scale_bits, args.scales_dtype);
  const uint32_t zero = int4_zero_of(range, args.symmetric, scale);
  if (has_row && lane == 0)
    args.scales[int4_scale(args.layout, args.rows, args.groups, n, g)] = scale_bits;
  if (args.zeros != nullptr) {
    const uint32_t word = across_rows(has_row ? zero : 0) - args.zero_offset * kInt4Ones;
    if (threadIdx.x % 32 == 0)
      args.zeros[int4_zero(args.layout, args.rows, args.groups, octet * 8, g).word] =
          args.layout == NF4_INT4_AWQ ? awq_word(word) : word;
  }

  // The same number of turns for all lanes, which exchange words.
  for (int64_t turn = 0; turn < args.group_size; turn += kRowLanes * 8) {
    const int64_t k = turn + lane * 8;
    const int64_t left = args.group_size - k;
    uint32_t word = 0;
    if (left > 0) {
      float x[8];
      load_eight(in + k, left, args.aligned, x);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (args.aligned || i < left) word |= int4_encode(x[i], scale, zero) << (4 * i);
    }
    if (args.layout == NF4_INT4_AWQ) {
      const uint32_t column = awq_word(transpose(word));
      const int i = threadIdx.x % 32 / kRowLanes;
      if (i < left) args.packed[(first + k + i) * octets + octet] = column;
    } else if (has_row && left > 0) {
      args.packed[int4_code(args.layout, args.rows, args.cols, n, first + k).word] = word;
    }
  }
}

}  // namespace
}  // namespace nf4::cuda
