// Decodes integer codes to 16-bit numbers for the wgmma and multistage kernels, two at a time,
// without a LUT. (The skinny kernels decode in matmul/skinny/int4_mainloop.cuh.) A masked nibble
// becomes the low bits of a number of T: of a subnormal one in bf16, of 1024 plus the nibble in
// fp16. An FMA turns that into (q - z) / unit, which is exact, and a product with the scale rounds
// like dequantize. Two weights cost PRMT, LOP3, HFMA2, and HMUL2 if they are scaled (and another
// HFMA2 if the scale has more bits than T).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/element.cuh"
#include "nf4/nf4.h"

namespace nf4::cuda {
namespace {

// The scale of a row and K-step.
struct Int4Scale {
  // A float if it multiplies sums; otherwise in T, with the bits that T cuts off above.
  uint32_t scale;
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

// Turns nibbles into numbers: bits (v & mask | magic) * multiplier + addend of a 16-bit number. The
// nibble is in bits 0 to 3 (the low half of each constant) or 4 to 7 (the high half).
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

// The policies below say which nibbles of its words a lane uses. bytes() brings those of a pair to
// bytes 0 and 2, and mask, multiplier and addend turn them into numbers; `half` is one of the
// lane's two rows.

// Two neighbours along k are byte lane % 4 of a word, the low nibble first.
template <class T>
class NibblesOfByte {
 public:
  static __device__ constexpr uint32_t mask(int) { return 0x00f0000f; }
  static __device__ constexpr uint32_t multiplier(int) { return NibbleNumber<T>::kMultipliers; }
  static __device__ constexpr uint32_t addend(int) { return NibbleNumber<T>::kAddends; }

  __device__ __forceinline__ uint32_t bytes(uint32_t word) const {
    return __byte_perm(word, 0, select_);
  }

 private:
  const uint32_t select_ = threadIdx.x % 4 * 0x1111;
};

// Two neighbours along k are the same nibble of the two halves of a word: the low nibble for the
// first row, the high nibble for the second, in byte warp % 2 of the half.
template <class T>
class NibblesOfHalves {
 public:
  static __device__ constexpr uint32_t mask(int half) {
    return half == 0 ? 0x000f000f : 0x00f000f0;
  }
  static __device__ constexpr uint32_t multiplier(int half) {
    return twice(NibbleNumber<T>::kMultipliers, half);
  }
  static __device__ constexpr uint32_t addend(int half) {
    return twice(NibbleNumber<T>::kAddends, half);
  }

  __device__ __forceinline__ uint32_t bytes(uint32_t word) const {
    return __byte_perm(word, 0, select_);
  }

 private:
  static __device__ constexpr uint32_t twice(uint32_t pair, int half) {
    return half == 0 ? (pair & 0xffff) * 0x10001 : (pair >> 16) * 0x10001;
  }
  const uint32_t select_ = 0x2200 + threadIdx.x / 32 % 2 * 0x1111;
};

template <class T, nf4_int4_layout Layout>
struct NibblesOf {
  using Type = NibblesOfByte<T>;
};
template <class T>
struct NibblesOf<T, NF4_INT4_AWQ> {
  using Type = NibblesOfHalves<T>;
};

// (q - z) / unit, for scales that multiply sums.
template <class T, class Nibbles>
class Int4Codes {
 public:
  using Element = T;
  static constexpr float kUnit = NibbleNumber<T>::kUnit;

  __device__ __forceinline__ explicit Int4Codes(const uint8_t *) {}

  __device__ __forceinline__ uint32_t operator()(uint32_t word, int half,
                                                 const Int4Scale &scale) const {
    return as_bits(difference(word, half, scale));
  }

 protected:
  __device__ __forceinline__ PairOf<T> difference(uint32_t word, int half,
                                                  const Int4Scale &scale) const {
    using N = NibbleNumber<T>;
    const uint32_t number = masked_number(nibbles_.bytes(word), Nibbles::mask(half));
    PairOf<T> addend = as_pair<T>(scale.minus_zero);
    if constexpr (N::kMagic != 0) addend = __hadd2(addend, as_pair<T>(Nibbles::addend(half)));
    return __hfma2(as_pair<T>(number), as_pair<T>(Nibbles::multiplier(half)), addend);
  }

 private:
  // This is one LOP3; with two constants the compiler makes two.
  static __device__ __forceinline__ uint32_t masked_number(uint32_t bytes, uint32_t mask) {
    constexpr uint32_t kMagic = NibbleNumber<T>::kMagic;
    if constexpr (kMagic == 0) return bytes & mask;
    uint32_t number;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(number) : "r"(bytes), "r"(mask), "r"(kMagic));
    return number;
  }

  const Nibbles nibbles_;
};

// Weights over the unit, rounded as dequantize rounds them if the scale is a number of T. Otherwise
// they are rounded from the sum of the products of the scale's two parts, and the smaller product
// is rounded too.
template <class T, class Nibbles>
class Int4Scaled : public Int4Codes<T, Nibbles> {
 public:
  using Int4Codes<T, Nibbles>::Int4Codes;

  __device__ __forceinline__ uint32_t operator()(uint32_t word, int half,
                                                 const Int4Scale &scale) const {
    const PairOf<T> d = this->difference(word, half, scale);
    const PairOf<T> scales = as_pair<T>(scale.scale);
    if constexpr (sizeof(T) == sizeof(__half) && NibbleNumber<T>::kMagic != 0)
      return as_bits(__hmul2(d, __low2half2(scales)));
    else
      return as_bits(__hfma2(d, __low2bfloat162(scales), __hmul2(d, __high2bfloat162(scales))));
  }
};

}  // namespace
}  // namespace nf4::cuda
