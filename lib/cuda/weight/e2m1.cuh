// MXFP4 and NVFP4 weights in 16 bits: E2M1 numbers times scales of 8 bits. Both are numbers of T,
// so one product in T makes a weight, and rounds it as dequantize does. NVFP4's global scale
// multiplies the sums instead.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/scale_bytes.hpp"
#include "cuda/element.cuh"
#include "cuda/weight/view.hpp"

namespace nf4::cuda {
namespace {

template <class T>
struct E2m1 {
  static constexpr bool kFp16 = std::is_same_v<T, __half>;
  // fp16 has no scales above 2^15, where weights may still be finite. Entries are therefore larger
  // by this factor, and scales smaller. Scales of MXFP4 below 2^-22 become 0.
  static constexpr float kFactor = kFp16 ? 4.0f : 1.0f;

  // Returns the entries of a byte, the low nibble's in the low half.
  static __device__ __forceinline__ uint32_t pair(const float *codebook, uint32_t byte) {
    return pack_pair(T{}, codebook[byte % 16] * kFactor, codebook[byte / 16] * kFactor);
  }

  // Turns bytes, two in the halves of each word, into scales in T. There is one branch, since more
  // would keep the conversions apart.
  template <int Count>
  static __device__ __forceinline__ void to_scales(ScaleBytes kind, uint32_t (&words)[Count]) {
    if (kind == ScaleBytes::kE8M0) {
#pragma unroll
      for (uint32_t &word : words) word = e8m0(word);
    } else {
#pragma unroll
      for (uint32_t &word : words) word = e4m3(word);
    }
  }

  // Returns one of two scales, twice.
  static __device__ __forceinline__ uint32_t twice(uint32_t scales, int upper) {
    return __byte_perm(scales, 0, upper ? 0x3232 : 0x1010);
  }

  // Multiplies the bits of an entry, which are the low half, by the factor.
  static __device__ __forceinline__ uint32_t with_factor(uint32_t entry) {
    return multiply(entry, pack_pair(T{}, kFactor, kFactor));
  }

  static __device__ __forceinline__ uint32_t multiply(uint32_t entries, uint32_t scale) {
    using Pair = std::conditional_t<kFp16, __half2, __nv_bfloat162>;
    const Pair product =
        __hmul2(*reinterpret_cast<const Pair *>(&entries), *reinterpret_cast<const Pair *>(&scale));
    return *reinterpret_cast<const uint32_t *>(&product);
  }

 private:
  static __device__ __forceinline__ uint32_t e8m0(uint32_t bytes) {
    if constexpr (kFp16) {
      return pack_pair(__half{}, fp16_power(bytes & 255u), fp16_power(bytes >> 16));
    } else {
      // A byte is the exponent. 0 stands for a subnormal number, 255 for NaN: both have a bit more.
      const uint32_t is_255 = bytes + 0x00010001u, is_not_0 = bytes + 0x00ff00ffu;  // in bit 8
      return bytes * 128 + (((is_255 | ~is_not_0) & 0x01000100u) >> 2);
    }
  }
  // Powers above 2^15 give the same weights as this one: infinities and zeros.
  static __device__ __forceinline__ float fp16_power(uint32_t byte) {
    const float power = __uint_as_float(e8m0_bits(byte)) / kFactor;
    return power > 0x1p15f ? 0x1p15f : power;
  }

  // The magnitude's bits are those of a smaller number of T.
  static __device__ __forceinline__ uint32_t e4m3(uint32_t bytes) {
    constexpr int kShift = kFp16 ? 7 : 4;
    constexpr uint32_t kNaN = kFp16 ? 0x7e00 : 0x7fc0;
    constexpr float kScale = kFp16 ? 0x1p8f / kFactor : 0x1p120f;
    const uint32_t magnitudes = bytes & 0x007f007fu;
    const uint32_t is_nan = (magnitudes + 0x00010001u) >> 7 & 0x00010001u;
    const uint32_t signs = (bytes & 0x00800080u) << 8;
    return multiply(magnitudes << kShift, pack_pair(T{}, kScale, kScale)) | is_nan * kNaN | signs;
  }
};

// The global scales of a weight's rows, as factors of sums.
class GlobalScales {
 public:
  __device__ __forceinline__ explicit GlobalScales(const WeightView &weight)
      : weight_(weight), rows_(1) {
    if (exist())
      rows_ = static_cast<uint32_t>(weight.global_blocks / (weight.cols >> weight.blocksize_log2));
  }
  __device__ __forceinline__ bool exist() const { return weight_.scale_bytes == ScaleBytes::kE4M3; }
  // The scale of a row, which may be past the last one of the weight; 1 if there is none.
  __device__ __forceinline__ float of(int64_t row) const {
    if (!exist()) return 1.0f;
    const auto existing = static_cast<uint32_t>(min(row, weight_.rows - 1));
    const float scale = weight_.nested_absmax[existing / rows_];
    return weight_.global_divides ? 1.0f / scale : scale;
  }

 private:
  const WeightView &weight_;
  uint32_t rows_;  // rows that share a scale
};

}  // namespace
}  // namespace nf4::cuda
