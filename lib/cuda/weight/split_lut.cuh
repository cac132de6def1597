// Splits fp32 into two parts of fp16, for fp32 products on tensor cores, and makes the byte LUT of
// such entries.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/weight/byte_lut.cuh"
#include "cuda/weight/codebooks.cuh"

namespace nf4::cuda {
namespace {

// Powers of two: `scale` brings numbers up to `largest` to [2^14, 2^15), near the end of fp16, and
// `unit` brings them back to the power of two below `largest`. Bits below 2^-40 of the largest are
// lost. A largest that is not finite is treated as a finite one.
struct SplitUnit {
  static constexpr uint32_t kBias = 127, kTop = 14;
  static constexpr float kToOne = 1.0f / (1 << kTop);  // from there to [1, 2)
  float scale;
  float unit;

  __device__ __forceinline__ explicit SplitUnit(float largest) {
    const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, kTop + 1), 2 * kBias);
    scale = __uint_as_float((2 * kBias + kTop - exponent) << 23);
    unit = __uint_as_float(exponent << 23);
  }
};

// The high parts of two numbers over a unit, and the remainders. A number that is not finite leaves
// a NaN.
__device__ __forceinline__ void split_pair(float first, float second, float scale, uint32_t &high,
                                           uint32_t &low) {
  first = multiply_rn(first, scale);
  second = multiply_rn(second, scale);
  high = pack_pair(__half{}, first, second);
  const float2 rounded = __half22float2(*reinterpret_cast<const __half2 *>(&high));
  low = pack_pair(__half{}, first - rounded.x, second - rounded.y);
}

// Like ByteLut, with entries of 8 bytes: the high parts of a byte's two numbers, and their low
// parts.
class SplitLut {
 public:
  static constexpr int kLaneBytes = 8;

  __device__ __forceinline__ SplitLut(const uint8_t *lut, uint32_t lane_bytes)
      : lut_(lut), lane_(lane_bytes) {}

  template <int Byte>
  __device__ __forceinline__ uint2 pair(uint32_t word) const {
    constexpr uint32_t kLaneThenByte = 0x5504 | Byte << 4;
    return *reinterpret_cast<const uint2 *>(lut_ + __byte_perm(word, lane_, kLaneThenByte));
  }

 private:
  const uint8_t *lut_;
  uint32_t lane_;
};

// Fills it and returns the unit of entries. All Threads threads of the CTA call it, each with entry
// threadIdx.x % 16 of the codebook.
template <int Threads>
__device__ __forceinline__ float fill_split_lut(uint8_t *lut, float entry) {
  uint32_t largest = __float_as_uint(entry) & 0x7fffffffu;
  largest = __reduce_max_sync(0xffffffffu, largest >= 0x7f800000u ? 0 : largest);
  const SplitUnit split(__uint_as_float(largest));
  uint32_t high, low;
  split_pair(entry, 0.0f, split.scale, high, low);
  fill_lut<8, Threads>(lut, static_cast<int>(threadIdx.x), high | low << 16,
                       [](uint32_t first, uint32_t second) {
                         const uint32_t highs = __byte_perm(first, second, 0x5410);
                         const uint32_t lows = __byte_perm(first, second, 0x7632);
                         return uint4{highs, lows, highs, lows};
                       });
  return split.unit;
}

}  // namespace
}  // namespace nf4::cuda
