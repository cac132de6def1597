// A table of the two numbers of each byte, in 16 bits each.
#pragma once

#include <cstdint>

#include "core/decode.hpp"
#include "core/formats.hpp"
#include "cuda/element.cuh"
#include "cuda/matmul/few_args.hpp"

namespace nf4::cuda {
namespace {

// 256 entries at a distance of 256 bytes, each as often as there are lanes: a lane reads its
// own bank, and its address is the byte and the lane's, side by side.
class PairTable {
 public:
  // lane_bytes is 4 times the lane.
  __device__ __forceinline__ PairTable(const uint8_t *shared, uint32_t lane_bytes)
      : table_(shared), lane_(lane_bytes) {}

  // The numbers of byte Byte of a word: of the high nibble, which comes first, in the low half.
  template <int Byte>
  __device__ __forceinline__ uint32_t pair(uint32_t word) const {
    constexpr uint32_t kLaneThenByte = 0x5504 | Byte << 4;  // and zeros, the lane's second byte
    return *reinterpret_cast<const uint32_t *>(table_ + __byte_perm(word, lane_, kLaneThenByte));
  }

 private:
  const uint8_t *table_;
  uint32_t lane_;
};

// The power of two that brings the codebook's largest entry to [1, 2), or [2, 4) where its
// inverse would be subnormal, so that 16 bits hold any codebook: the table has the entries
// over it. 1 for the formats' own.
__device__ __forceinline__ float codebook_factor(float entry) {
  constexpr uint32_t kExponent = 0x7f800000u, kLargestFactor = 0x7e800000u;
  uint32_t largest = __float_as_uint(entry) & 0x7fffffffu;
  if (largest >= kExponent) largest = 0;
#pragma unroll
  for (int distance = 1; distance < kCodebookSize; distance *= 2)
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  const uint32_t factor = min(largest & kExponent, kLargestFactor);
  return factor == 0 ? 1.0f : __uint_as_float(factor);
}

// The codebook's entry of this lane as a number of T, and the unit of entries. `rounded` is the
// format's own codebook, `codebook` a caller's or NULL.
template <class T>
__device__ __forceinline__ uint32_t lane_entry(const RoundedCodebook &rounded,
                                               const float *codebook, float &unit) {
  unit = rounded.unit;
  uint32_t code = rounded.entries[threadIdx.x % kCodebookSize];
  if (codebook != nullptr) {
    const float entry = codebook[threadIdx.x % kCodebookSize];
    unit = codebook_factor(entry);
    constexpr uint32_t kTwiceOne = 0x7f000000u;  // the exponents of a power and its inverse
    code = pack_pair(T{}, multiply_rn(entry, __uint_as_float(kTwiceOne - __float_as_uint(unit))),
                     0.0f);
  }
  return code;
}

// A table of bytes, 16 at a time: Threads threads in whole warps call it, numbered by `thread`,
// each with entry threadIdx.x % 16 of the codebook. make(first, second) is four words of a byte.
template <int Bytes, int Threads, class Entry, class Make>
__device__ __forceinline__ void fill_table(uint8_t *table, int thread, Entry entry, Make make) {
  constexpr int kPieces = 2 * Bytes;        // of 16 bytes, which are the copies of a byte
  constexpr int kStep = Threads / kPieces;  // bytes on, whose low nibble is the same
  static_assert(kStep % kCodebookSize == 0);
  const int byte = thread / kPieces, piece = thread % kPieces;
  const Entry second = __shfl_sync(0xffffffffu, entry, byte, kCodebookSize);
#pragma unroll
  for (int i = 0; i < 256; i += kStep) {
    const Entry first = __shfl_sync(0xffffffffu, entry, (byte + i) >> 4, kCodebookSize);
    reinterpret_cast<uint4 *>(table)[(byte + i) * 16 + piece] = make(first, second);
  }
}

// Four lanes' copies of two entries of 16 bits.
__device__ __forceinline__ uint4 both_entries(uint32_t first, uint32_t second) {
  const uint32_t pair = __byte_perm(first, second, 0x5410);
  return {pair, pair, pair, pair};
}

// All threads of the block call it, and a barrier must follow. Returns what a sum of products is
// to be multiplied by.
template <class T>
__device__ __forceinline__ float build_pair_table(const FewArgs &few, uint8_t *shared) {
  float unit;
  const uint32_t code = lane_entry<T>(few.codebook, few.matmul.codebook, unit);
  fill_table<4, kFewThreads>(shared, static_cast<int>(threadIdx.x), code, both_entries);
  return unit;
}

}  // namespace
}  // namespace nf4::cuda
