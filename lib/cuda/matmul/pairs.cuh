// A table of the two numbers of each byte, in 16 bits each.
#pragma once

#include <cstdint>

#include "core/decode.hpp"
#include "cuda/element.cuh"
#include "cuda/matmul/args.hpp"
#include "cuda/tables.cuh"

namespace nf4::cuda {
namespace {

// 256 entries at a distance of 256 bytes, each as often as there are lanes: a lane reads its
// own bank, and its address is the byte and the lane's, side by side.
class PairTable {
 public:
  __device__ __forceinline__ explicit PairTable(const uint8_t *shared)
      : table_(shared), lane_(threadIdx.x % 32 * 4) {}

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

// All threads of the block call it, and a barrier must follow. Returns the factor.
template <class T, int Threads>
__device__ __forceinline__ float build_pair_table(const float *own, nf4_format format,
                                                  uint8_t *shared) {
  const float entry = __ldg(device_codebook(own, format) + threadIdx.x % kCodebookSize);
  const float factor = own == nullptr ? 1.0f : codebook_factor(entry);
  constexpr uint32_t kTwiceOne = 0x7f000000u;  // the exponents of a power and its inverse
  const float scaled = multiply_rn(entry, __uint_as_float(kTwiceOne - __float_as_uint(factor)));
  constexpr int kPieces = 8;  // of 16 bytes, which are four lanes' copies
#pragma unroll
  for (int i = 0; i < 256 * kPieces; i += Threads) {
    const int index = i + static_cast<int>(threadIdx.x);
    const int byte = index / kPieces;
    const float first = __shfl_sync(0xffffffffu, scaled, byte >> 4, kCodebookSize);
    const float second = __shfl_sync(0xffffffffu, scaled, byte, kCodebookSize);
    const uint32_t pair = pack_pair(T{}, first, second);
    *reinterpret_cast<uint4 *>(shared + byte * 256 + index % kPieces * 16) = {pair, pair, pair,
                                                                              pair};
  }
  return factor;
}

}  // namespace
}  // namespace nf4::cuda
