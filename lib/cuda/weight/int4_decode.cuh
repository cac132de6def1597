// Decoding of integer codes to 16-bit numbers, two at a time, without a LUT. A masked nibble is the
// low bits of a number of T: in bf16 of a subnormal one, in fp16 of 1024 + what they are. An FMA
// makes (q - z) / unit of it, which is exact, and a product with the scale rounds as dequantize.
// Cost of two weights: PRMT, LOP3, HFMA2, and HMUL2 if they are scaled (and HFMA2 if the scale has
// more bits than T).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/element.cuh"
#include "nf4/nf4.h"

namespace nf4::cuda {
namespace {

// Of a row and K-step.
struct Int4Scale {
  uint32_t scale;       // a float where it multiplies sums; else in T, and what T cuts off (high)
  uint32_t minus_zero;  // -z / unit in T, twice
};

template <class T>
struct Pair;
template <>
struct Pair<__half> {
  using Type = __half2;
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};
template <class T>
using PairOf = typename Pair<T>::Type;

template <class T>
__device__ __forceinline__ PairOf<T> as_pair(uint32_t bits) {
  return *reinterpret_cast<const PairOf<T> *>(&bits);
}
template <class P>
__device__ __forceinline__ uint32_t as_bits(P pair) {
  return *reinterpret_cast<const uint32_t *>(&pair);
}

// What makes numbers of nibbles: bits (v & mask | magic) * multiplier + addend of a 16-bit number,
// where a nibble is in bits 0 to 3 (the low half of each constant) or 4 to 7 (the high half).
template <class T>
struct NibbleNumber;
template <>
struct NibbleNumber<__nv_bfloat16> {  // q * 2^-133 or q * 2^-129; multiplied by 2^127 or 2^123
  static constexpr float kUnit = 64.0f;
  static constexpr uint32_t kMagic = 0;
  static constexpr uint32_t kMultipliers = 0x7d007f00;
  static constexpr uint32_t kAddends = 0;
};
template <>
struct NibbleNumber<__half> {  // 1024 + q or 1024 + 16 q; multiplied by 1 or 1 / 16
  static constexpr float kUnit = 1.0f;
  static constexpr uint32_t kMagic = 0x64006400;
  static constexpr uint32_t kMultipliers = 0x2c003c00;
  static constexpr uint32_t kAddends = 0xd400e400;  // -64, -1024
};

// Which nibbles of its words a lane uses. bytes() brings a pair's to bytes 0 and 2.

// Two neighbours along k are byte lane % 4 of a word, the low nibble first.
template <class T>
class NibblesOfByte {
 public:
  static constexpr uint32_t kMask = 0x00f0000f;

  __device__ __forceinline__ uint32_t bytes(uint32_t word, int) const {
    return __byte_perm(word, 0, select_);
  }
  __device__ __forceinline__ uint32_t mask() const { return kMask; }
  __device__ __forceinline__ uint32_t multiplier() const { return NibbleNumber<T>::kMultipliers; }
  __device__ __forceinline__ uint32_t addend() const { return NibbleNumber<T>::kAddends; }

 private:
  const uint32_t select_ = threadIdx.x % 4 * 0x1111;
};

// Neighbours along k are the same nibble of two words: lane / 4 % 4 of the first row, and the
// fourth after it of the second.
template <class T>
class NibblesOfTwoWords {
 public:
  __device__ __forceinline__ uint32_t bytes(uint2 words, int half) const {
    return __byte_perm(words.x, words.y, half == 0 ? select_ : select_ + 0x2222);
  }
  __device__ __forceinline__ uint32_t mask() const { return mask_; }
  __device__ __forceinline__ uint32_t multiplier() const { return multiplier_; }
  __device__ __forceinline__ uint32_t addend() const { return addend_; }

 private:
  using N = NibbleNumber<T>;
  static __device__ __forceinline__ bool high() { return threadIdx.x / 4 % 2 != 0; }
  static __device__ __forceinline__ uint32_t twice(uint32_t pair) {
    return __byte_perm(pair, 0, high() ? 0x3232 : 0x1010);
  }
  const uint32_t select_ = threadIdx.x / 8 % 2 * 0x1111 + 0x4400;
  const uint32_t mask_ = high() ? 0x00f000f0 : 0x000f000f;
  const uint32_t multiplier_ = twice(N::kMultipliers);
  const uint32_t addend_ = twice(N::kAddends);
};

template <class T, nf4_int4_layout Layout>
struct NibblesOf {
  using Type = NibblesOfByte<T>;
};
template <class T>
struct NibblesOf<T, NF4_INT4_AWQ> {
  using Type = NibblesOfTwoWords<T>;
};

// (q - z) / unit, for scales on sums.
template <class T, class Nibbles>
class Int4Codes {
 public:
  using Element = T;
  static constexpr float kUnit = NibbleNumber<T>::kUnit;

  __device__ __forceinline__ explicit Int4Codes(const uint8_t *) {}

  template <class Words>
  __device__ __forceinline__ uint32_t operator()(Words words, int half,
                                                 const Int4Scale &scale) const {
    return as_bits(difference(words, half, scale));
  }

 protected:
  template <class Words>
  __device__ __forceinline__ PairOf<T> difference(Words words, int half,
                                                  const Int4Scale &scale) const {
    using N = NibbleNumber<T>;
    const uint32_t number = (nibbles_.bytes(words, half) & nibbles_.mask()) | N::kMagic;
    PairOf<T> addend = as_pair<T>(scale.minus_zero);
    if constexpr (N::kMagic != 0) addend = __hadd2(addend, as_pair<T>(nibbles_.addend()));
    return __hfma2(as_pair<T>(number), as_pair<T>(nibbles_.multiplier()), addend);
  }

 private:
  const Nibbles nibbles_;
};

// Weights over the unit, as dequantize rounds them where the scale is one of T. Else they are
// rounded from the sum of its two parts' products, of which the smaller is rounded too.
template <class T, class Nibbles>
class Int4Scaled : public Int4Codes<T, Nibbles> {
 public:
  using Int4Codes<T, Nibbles>::Int4Codes;

  template <class Words>
  __device__ __forceinline__ uint32_t operator()(Words words, int half,
                                                 const Int4Scale &scale) const {
    const PairOf<T> d = this->difference(words, half, scale);
    const PairOf<T> scales = as_pair<T>(scale.scale);
    if constexpr (sizeof(T) == sizeof(__half) && NibbleNumber<T>::kMagic != 0)
      return as_bits(__hmul2(d, __low2half2(scales)));
    else
      return as_bits(__hfma2(d, __low2bfloat162(scales), __hmul2(d, __high2bfloat162(scales))));
  }
};

}  // namespace
}  // namespace nf4::cuda
