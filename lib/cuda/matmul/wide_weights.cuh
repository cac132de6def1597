// Bytes of the weight to numbers of 16 bits times their scales, as consumers of the wide
// kernels need them.
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
      : table_(table), lane_(threadIdx.x % 32 * Bytes), selector_(0x5504 | threadIdx.x % 4 << 4) {}
  __device__ __forceinline__ const uint8_t *address(uint32_t word) const {
    return table_ + __byte_perm(word, lane_, selector_);
  }

 private:
  const uint8_t *table_;
  uint32_t lane_;
  uint32_t selector_;
};

// A table of bytes, 16 at a time: Threads threads in whole warps call it, numbered by `thread`.
template <int Bytes, int Threads, class Entry>
__device__ __forceinline__ void fill_table(uint8_t *table, int thread, float entry, Entry make) {
  constexpr int kPieces = 2 * Bytes;  // of 16 bytes, which are the copies of a byte
#pragma unroll
  for (int i = 0; i < 256 * kPieces; i += Threads) {
    const int byte = (i + thread) / kPieces, piece = (i + thread) % kPieces;
    const float first = __shfl_sync(0xffffffffu, entry, byte >> 4, kCodebookSize);
    const float second = __shfl_sync(0xffffffffu, entry, byte, kCodebookSize);
    *reinterpret_cast<uint4 *>(table + byte * 256 + piece * 16) = make(first, second);
  }
}

// The codebook's entry of this lane. The formats' own come with the arguments, not from memory.
__device__ __forceinline__ float codebook_entry(const WideArgs &wide) {
  const int index = static_cast<int>(threadIdx.x) % kCodebookSize;
  return wide.matmul.codebook == nullptr ? wide.codebook[index] : wide.matmul.codebook[index];
}

// A table of codebook entries, over the factor that is returned.
template <class Element, int Threads>
__device__ __forceinline__ float fill_pair_table(const WideArgs &wide, uint8_t *table, int thread) {
  const float entry = codebook_entry(wide);
  const float factor = wide.matmul.codebook == nullptr ? 1.0f : codebook_factor(entry);
  fill_table<4, Threads>(table, thread, __fdiv_rn(entry, factor), [](float first, float second) {
    const uint32_t pair = pack_pair(Element{}, first, second);
    return uint4{pair, pair, pair, pair};
  });
  return factor;
}

// bf16, nearly as dequantize rounds: a table of fp16, whose entries are exact to an eighth of
// what the weights are rounded to.
class NearWeights {
 public:
  using Element = __nv_bfloat16;

  // Returns the factor of the sums.
  template <int Threads>
  static __device__ __forceinline__ float build(const WideArgs &wide, uint8_t *table, int thread) {
    return fill_pair_table<__half, Threads>(wide, table, thread);
  }

  __device__ __forceinline__ explicit NearWeights(const uint8_t *table) : table_(table) {}

  // As it lies in shared memory, and as it is used.
  static __device__ __forceinline__ uint32_t pack_scale(float scale) {
    return __float_as_uint(scale);
  }
  struct Scale {
    float value;
    __device__ __forceinline__ explicit Scale(uint32_t packed) { value = __uint_as_float(packed); }
  };

  // The two weights of this lane's byte of the word.
  __device__ __forceinline__ uint32_t operator()(uint32_t word, Scale scale) const {
    const float2 entries = __half22float2(*reinterpret_cast<const __half2 *>(table_.address(word)));
    return pack_pair(__nv_bfloat16{}, multiply_rn(entries.x, scale.value),
                     multiply_rn(entries.y, scale.value));
  }

 private:
  QuadTable<4> table_;
};

// fp16, as dequantize rounds: a table of binary32.
class ExactWeights {
 public:
  using Element = __half;

  template <int Threads>
  static __device__ __forceinline__ float build(const WideArgs &wide, uint8_t *table, int thread) {
    fill_table<8, Threads>(table, thread, codebook_entry(wide), [](float first, float second) {
      const uint32_t a = __float_as_uint(first), b = __float_as_uint(second);
      return uint4{a, b, a, b};
    });
    return 1.0f;
  }

  __device__ __forceinline__ explicit ExactWeights(const uint8_t *table) : table_(table) {}

  static __device__ __forceinline__ uint32_t pack_scale(float scale) {
    return __float_as_uint(scale);
  }
  using Scale = NearWeights::Scale;

  __device__ __forceinline__ uint32_t operator()(uint32_t word, Scale scale) const {
    const float2 entries = *reinterpret_cast<const float2 *>(table_.address(word));
    return pack_pair(__half{}, multiply_rn(entries.x, scale.value),
                     multiply_rn(entries.y, scale.value));
  }

 private:
  QuadTable<8> table_;
};

}  // namespace
}  // namespace nf4::cuda
