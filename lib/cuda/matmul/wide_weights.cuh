// Bytes of the weight to numbers of 16 bits times their scales, as consumers of the wide
// kernels need them.
//
// The table's entries are the codebook's times a stretch, which the rest of the computation
// takes back: one for which the rounding of the entries is small and, weighted by how often
// normal weights have them, about 0 on average. Where x is not 0 on average, an error of all
// weights in one direction would grow with the number of columns, and roundings of single
// weights do not. Root mean square and mean of it, over the weights' root mean square: bf16
// 0.95e-3 and -1.5e-5 (unstretched 1.36e-3 and 4.6e-4; 0.78e-3 and 3.4e-4 at the stretch for
// the former alone), fp16 0.088e-3 and -0.4e-5 (0.18e-3 and -2.9e-5).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/pairs.cuh"

namespace nf4::cuda {
namespace {

template <class T>
struct WideWeights;

// bf16: a scale is the sum of two numbers of 16 bits, so that a weight is rounded once but for
// 1 in 2^8 of its last bit. The table's factor is applied to the sums.
template <>
struct WideWeights<__nv_bfloat16> {
  static constexpr float kNf4Stretch = 1.241835f;

  static __device__ __forceinline__ uint32_t shared_scale(float scale, float) {
    const float high = __bfloat162float(__float2bfloat16_rn(scale));
    return pack_pair(__nv_bfloat16{}, scale - high, high);
  }
  static __device__ __forceinline__ float sum_factor(float factor) { return factor; }

  struct Scale {
    __nv_bfloat162 high, low;
    __device__ __forceinline__ explicit Scale(uint32_t shared) {
      const __nv_bfloat162 both = *reinterpret_cast<const __nv_bfloat162 *>(&shared);
      high = __high2bfloat162(both);
      low = __low2bfloat162(both);
    }
    __device__ __forceinline__ uint32_t times(uint32_t pair) const {
      const __nv_bfloat162 entries = *reinterpret_cast<const __nv_bfloat162 *>(&pair);
      const __nv_bfloat162 weights = __hfma2(entries, high, __hmul2_rn(entries, low));
      return *reinterpret_cast<const uint32_t *>(&weights);
    }
  };
};

// fp16: a scale may be out of its range though the weights are not. They are multiplied in
// binary32 with the table's factor in the scale.
template <>
struct WideWeights<__half> {
  static constexpr float kNf4Stretch = 1.575190f;

  // An entry that no weight has may be so large that its product with the scale is not finite.
  static __device__ __forceinline__ uint32_t shared_scale(float scale, float factor) {
    return __float_as_uint(fmaxf(-FLT_MAX, fminf(multiply_rn(scale, factor), FLT_MAX)));
  }
  static __device__ __forceinline__ float sum_factor(float) { return 1.0f; }

  struct Scale {
    float scale;
    __device__ __forceinline__ explicit Scale(uint32_t shared) { scale = __uint_as_float(shared); }
    __device__ __forceinline__ uint32_t times(uint32_t pair) const {
      const float2 entries = __half22float2(*reinterpret_cast<const __half2 *>(&pair));
      return pack_pair(__half{}, multiply_rn(entries.x, scale), multiply_rn(entries.y, scale));
    }
  };
};

// FP4's entries are thirds; three halves make them exact. A caller's codebook stays as it is.
template <class T>
__device__ __forceinline__ float table_stretch(const MatmulArgs &args) {
  if (args.codebook != nullptr) return 1.0f;
  return args.format == NF4_FORMAT_FP4 ? 1.5f : WideWeights<T>::kNf4Stretch;
}

// What the table's entries are over the codebook's, inverted.
template <class T>
__device__ __forceinline__ float table_factor(const MatmulArgs &args) {
  const float *codebook = device_codebook(args.codebook, args.format);
  const float factor = args.codebook == nullptr
                           ? 1.0f
                           : codebook_factor(__ldg(codebook + threadIdx.x % kCodebookSize));
  return __fdiv_rn(factor, table_stretch<T>(args));
}

// The two numbers of byte lane % 4 of a word.
class QuadPairs {
 public:
  __device__ __forceinline__ explicit QuadPairs(const uint8_t *table)
      : table_(table), lane_(threadIdx.x % 32 * 4), selector_(0x5504 | threadIdx.x % 4 << 4) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return *reinterpret_cast<const uint32_t *>(table_ + __byte_perm(word, lane_, selector_));
  }

 private:
  const uint8_t *table_;
  uint32_t lane_;
  uint32_t selector_;
};

}  // namespace
}  // namespace nf4::cuda
