// The byte look-up table (LUT) in shared memory: for each byte of packed weights, its two codebook
// entries in 16 bits each.
#pragma once

#include <cstdint>

#include "core/decode.hpp"
#include "core/formats.hpp"
#include "cuda/element.cuh"
#include "cuda/ptx/permute.cuh"

namespace nf4::cuda {
namespace {

// 256 entries, 256 bytes apart, each with a copy for every lane. A lane reads its own bank; its
// address consists of the byte and the lane's offset, side by side.
class ByteLut {
 public:
  static constexpr int kLaneBytes = 4;
  static constexpr bool kNarrow = false;

  // lane_bytes is kLaneBytes times the lane.
  __device__ __forceinline__ ByteLut(const uint8_t *lut, uint32_t lane_bytes)
      : lut_(lut), lane_(lane_bytes) {}

  // Returns the entries of byte Byte of a word. The entry of the high nibble, which is the first
  // element, is in the low half.
  template <int Byte>
  __device__ __forceinline__ uint32_t pair(uint32_t word) const {
    constexpr uint32_t kLaneThenByte = 0x5504 | Byte << 4;  // and zeros, the lane's second byte
    return *reinterpret_cast<const uint32_t *>(lut_ + __byte_perm(word, lane_, kLaneThenByte));
  }

 private:
  const uint8_t *lut_;
  uint32_t lane_;
};

// The same in half of the bytes: an entry's copies take 128 bytes. The entries of bytes from 128 on
// lie between those of smaller bytes, so that a byte's highest bit stays above the lane's offset.
// Four look-ups share two more instructions.
class NarrowByteLut {
 public:
  static constexpr int kLaneBytes = 4;
  static constexpr bool kNarrow = true;

  // lane_bytes is kLaneBytes times the lane.
  __device__ __forceinline__ NarrowByteLut(const uint8_t *lut, uint32_t lane_bytes)
      : lut_(lut), lanes_(lane_bytes * 0x01010101u) {}

  // See ByteLut::pair.
  template <int Byte>
  __device__ __forceinline__ uint32_t pair(uint32_t word) const {
    const uint32_t low = (word & 0x80808080u) | lanes_, high = word & 0x7f7f7f7fu;
    constexpr uint32_t kZero = 8;  // the sign of a byte of `high`
    constexpr uint32_t kBytes = Byte | (4 + Byte) << 4 | (4 | kZero) << 8 | (4 | kZero) << 12;
    return *reinterpret_cast<const uint32_t *>(lut_ + permute_bytes<kBytes>(low, high));
  }

 private:
  const uint8_t *lut_;
  uint32_t lanes_;
};

// The power of two that scales the codebook's largest entry to [1, 2), or to [2, 4) if its inverse
// would be subnormal, so that 16 bits hold any codebook. It is 1 for the formats' own codebooks.
__device__ __forceinline__ float codebook_exponent(float entry) {
  constexpr uint32_t kExponent = 0x7f800000u, kLargest = 0x7e800000u;
  uint32_t largest = __float_as_uint(entry) & 0x7fffffffu;
  if (largest >= kExponent) largest = 0;
#pragma unroll
  for (int distance = 1; distance < kCodebookSize; distance *= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  const uint32_t power = min(largest & kExponent, kLargest);
  return power == 0 ? 1.0f : __uint_as_float(power);
}

// The codebook entry of this lane as a number of T, and the unit of entries. `rounded` is the
// format's own codebook; `codebook` is a caller's or NULL.
template <class T>
__device__ __forceinline__ uint32_t lane_entry(const RoundedCodebook &rounded,
                                               const float *codebook, float &unit) {
  unit = rounded.unit;
  uint32_t bits = rounded.entries[threadIdx.x % kCodebookSize];
  if (codebook != nullptr) {
    const float entry = codebook[threadIdx.x % kCodebookSize];
    unit = codebook_exponent(entry);
    constexpr uint32_t kTwiceOne = 0x7f000000u;  // the exponents of a power and its inverse
    bits = pack_pair(T{}, multiply_rn(entry, __uint_as_float(kTwiceOne - __float_as_uint(unit))),
                     0.0f);
  }
  return bits;
}

// Fills a LUT with Bytes bytes for each entry and lane, 16 bytes at a time, or a narrow one.
// Threads threads in whole warps call it, numbered by `thread`, each with entry threadIdx.x % 16 of
// the codebook. make(first, second) returns four words for a byte.
template <int Bytes, int Threads, class Lut = ByteLut, class Entry, class Make>
__device__ __forceinline__ void fill_lut(uint8_t *lut, int thread, Entry entry, Make make) {
  constexpr int kVectors = 2 * Bytes;  // 16-byte vectors: the copies of an entry
  // Distance to the next byte, whose low nibble is the same.
  constexpr int kStep = Threads / kVectors;
  static_assert(kStep % kCodebookSize == 0 && 128 % kStep == 0);
  const int byte = thread / kVectors, vector = thread % kVectors;
  const Entry second = __shfl_sync(0xffffffffu, entry, byte, kCodebookSize);
#pragma unroll
  for (int i = 0; i < 256; i += kStep) {
    const Entry first = __shfl_sync(0xffffffffu, entry, (byte + i) >> 4, kCodebookSize);
    // kStep divides 128: the second half of the entries are those of later steps.
    const int at = Lut::kNarrow ? (byte + i % 128) * 16 + i / 128 * 8 : (byte + i) * 16;
    reinterpret_cast<uint4 *>(lut)[at + vector] = make(first, second);
  }
}

// Packs two 16-bit entries for four lanes.
__device__ __forceinline__ uint4 pack_entries(uint32_t first, uint32_t second) {
  const uint32_t pair = __byte_perm(first, second, 0x5410);
  return {pair, pair, pair, pair};
}

// The same if the low nibble is the first element.
__device__ __forceinline__ uint4 pack_low_first(uint32_t high, uint32_t low) {
  return pack_entries(low, high);
}

}  // namespace
}  // namespace nf4::cuda
