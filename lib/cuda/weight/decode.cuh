// The decode policies of the wgmma kernels for weights with a codebook: they turn the codes in a
// lane's byte into two 16-bit numbers. Each policy is a lane's view of a LUT that build<Threads>()
// fills; all consumers call it, and it returns the unit of the sums. `codebook` is a caller's, or
// NULL for the format's own, which is in `own`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/weight/byte_lut.cuh"
#include "cuda/weight/lut_codebook.hpp"

namespace nf4::cuda {
namespace {

// Finds the entry for a byte of a word, byte lane % 4 unless given, in a table of 256 entries, 256
// bytes apart, in which each lane reads one of four copies.
class QuadLut {
 public:
  __device__ __forceinline__ explicit QuadLut(const uint8_t *lut) : QuadLut(lut, threadIdx.x % 4) {}
  __device__ __forceinline__ QuadLut(const uint8_t *lut, uint32_t byte)
      : lut_(lut), lane_(threadIdx.x % 32 * kLaneBytes << 24 | kZeroZeroByteLane | byte << 4) {}
  __device__ __forceinline__ const uint8_t *address(uint32_t word) const {
    return lut_ + __byte_perm(word, lane_, lane_);
  }

 private:
  static constexpr uint32_t kLaneBytes = 4;
  // Bytes 2 and 3 of lane_ are 0 and the copy's offset. Bytes 0 and 1 select those two, the word's
  // byte, and byte 2 for the bits above.
  static constexpr uint32_t kZeroZeroByteLane = 0x6607;

  const uint8_t *lut_;
  uint32_t lane_;
};

// Codebook entries in T, for scales that multiply sums: the LUT of the skinny kernels.
template <class T>
class LutEntries {
 public:
  using Element = T;

  template <int Threads>
  static __device__ __forceinline__ float build(const LutCodebook &own, const float *codebook,
                                                uint8_t *lut, int thread) {
    float unit;
    const uint32_t entry = lane_entry<T>(own.rounded, codebook, unit);
    fill_lut<4, Threads>(lut, thread, entry, pack_entries);
    return unit;
  }

  __device__ __forceinline__ explicit LutEntries(const uint8_t *lut) : lut_(lut) {}

  // Looks up this lane's byte of the word.
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return *reinterpret_cast<const uint32_t *>(lut_.address(word));
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t word, int, float) const {
    return operator()(word);
  }

 private:
  QuadLut lut_;
};

// Weights in bf16, nearly as dequantize rounds them: entries in fp16 times the scale. The products
// are exact to an eighth of the weights' rounding, and their errors cancel. This is only for the
// formats' own codebooks: a caller's may have small entries beside large ones.
class LutScaledBf16 {
 public:
  using Element = __nv_bfloat16;

  template <int Threads>
  static __device__ __forceinline__ float build(const LutCodebook &own, const float *, uint8_t *lut,
                                                int thread) {
    return LutEntries<__half>::build<Threads>(own, nullptr, lut, thread);
  }

  __device__ __forceinline__ explicit LutScaledBf16(const uint8_t *lut) : entries_(lut) {}

  __device__ __forceinline__ uint32_t operator()(uint32_t word, int, float scale) const {
    const uint32_t pair = entries_(word);
    const float2 entries = __half22float2(*reinterpret_cast<const __half2 *>(&pair));
    return pack_pair(__nv_bfloat16{}, multiply_rn(entries.x, scale), multiply_rn(entries.y, scale));
  }

 private:
  LutEntries<__half> entries_;
};

// Weights in fp16, nearly as dequantize rounds them: entries around one (RoundedCodebook's
// around_one), which are exact to a sixth of the weights' rounding. This is only for the formats'
// own codebooks, and for scales that are multiplied by their unit.
class LutScaledFp16 {
 public:
  using Element = __half;

  template <int Threads>
  static __device__ __forceinline__ float build(const LutCodebook &own, const float *, uint8_t *lut,
                                                int thread) {
    LutEntries<__half>::build<Threads>(own, nullptr, lut, thread);
    return 1.0f;
  }

  __device__ __forceinline__ explicit LutScaledFp16(const uint8_t *lut) : entries_(lut) {}

  __device__ __forceinline__ uint32_t operator()(uint32_t word, int, float scale) const {
    const float2 entries = around_one(entries_(word));
    return pack_pair(__half{}, scaled(entries.x, scale), scaled(entries.y, scale));
  }

  // Returns both entries of a look-up.
  static __device__ __forceinline__ float2 around_one(uint32_t pair) {
    constexpr uint32_t kHalf = 0x3f000000;  // 0.5; its other bits are an entry's or 0
    return {__uint_as_float(__byte_perm(pair, kHalf, 0x7104)),
            __uint_as_float(__byte_perm(pair, kHalf, 0x7324))};
  }
  static __device__ __forceinline__ float scaled(float around_one, float scale) {
    return __fmaf_rn(around_one, scale, -scale);
  }

 private:
  LutEntries<__half> entries_;
};

}  // namespace
}  // namespace nf4::cuda
