// Bytes of the weight to numbers of 16 bits, with or without their scales, as consumers of the
// wide kernels need them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/matmul/pairs.cuh"
#include "cuda/matmul/wide_args.hpp"

namespace nf4::cuda {
namespace {

// The address of byte lane % 4 of a word in a table of 256 entries at a distance of 256 bytes,
// in which each lane has its own copy of Bytes bytes.
template <int Bytes>
class QuadTable {
 public:
  __device__ __forceinline__ explicit QuadTable(const uint8_t *table)
      : table_(table),
        lane_(threadIdx.x % 32 * Bytes << 24 | kZeroZeroByteLane | threadIdx.x % 4 << 4) {}
  __device__ __forceinline__ const uint8_t *address(uint32_t word) const {
    return table_ + __byte_perm(word, lane_, lane_);
  }

 private:
  // Bytes 2 and 3 of lane_ are 0 and the copy's offset; bytes 0 and 1 select: those two, the
  // word's byte, and byte 2 for what is above.
  static constexpr uint32_t kZeroZeroByteLane = 0x6607;

  const uint8_t *table_;
  uint32_t lane_;
};

// Each of these is a lane's part of a table. build<Threads>(wide, table, thread), of all threads
// that multiply, makes it and returns the unit of the sums.

// Entries of the codebook in T, whose scale is not in them: the few-row kernels' table.
template <class T>
class CodebookEntries {
 public:
  using Element = T;

  template <int Threads>
  static __device__ __forceinline__ float build(const WideArgs &wide, uint8_t *table, int thread) {
    float unit;
    const uint32_t entry = lane_entry<T>(wide.rounded, wide.matmul.codebook, unit);
    fill_table<4, Threads>(table, thread, entry, both_entries);
    return unit;
  }

  __device__ __forceinline__ explicit CodebookEntries(const uint8_t *table) : table_(table) {}

  // The two entries of this lane's byte of the word.
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return *reinterpret_cast<const uint32_t *>(table_.address(word));
  }

 private:
  QuadTable<4> table_;
};

// bf16, nearly as dequantize rounds: entries of fp16, which are exact to an eighth of what the
// weights are rounded to, and whose errors cancel. The formats' own codebooks alone: a caller's
// may have small entries beside large ones.
class NearWeights {
 public:
  using Element = __nv_bfloat16;

  template <int Threads>
  static __device__ __forceinline__ float build(const WideArgs &wide, uint8_t *table, int thread) {
    return CodebookEntries<__half>::build<Threads>(wide, table, thread);
  }

  __device__ __forceinline__ explicit NearWeights(const uint8_t *table) : entries_(table) {}

  // The two weights of this lane's byte of the word.
  __device__ __forceinline__ uint32_t operator()(uint32_t word, float scale) const {
    const uint32_t pair = entries_(word);
    const float2 entries = __half22float2(*reinterpret_cast<const __half2 *>(&pair));
    return pack_pair(__nv_bfloat16{}, multiply_rn(entries.x, scale), multiply_rn(entries.y, scale));
  }

 private:
  CodebookEntries<__half> entries_;
};

// fp16, as dequantize rounds: a table of binary32.
class ExactWeights {
 public:
  using Element = __half;

  template <int Threads>
  static __device__ __forceinline__ float build(const WideArgs &wide, uint8_t *table, int thread) {
    const int index = static_cast<int>(threadIdx.x) % kCodebookSize;
    const float entry =
        wide.matmul.codebook == nullptr ? wide.codebook[index] : wide.matmul.codebook[index];
    fill_table<8, Threads>(table, thread, entry, [](float first, float second) {
      const uint32_t a = __float_as_uint(first), b = __float_as_uint(second);
      return uint4{a, b, a, b};
    });
    return 1.0f;
  }

  __device__ __forceinline__ explicit ExactWeights(const uint8_t *table) : table_(table) {}

  __device__ __forceinline__ uint32_t operator()(uint32_t word, float scale) const {
    const float2 entries = *reinterpret_cast<const float2 *>(table_.address(word));
    return pack_pair(__half{}, multiply_rn(entries.x, scale), multiply_rn(entries.y, scale));
  }

 private:
  QuadTable<8> table_;
};

}  // namespace
}  // namespace nf4::cuda
