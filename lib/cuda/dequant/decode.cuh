// Decodes codes of a codebook to scaled weights in registers, for the kernels of aligned.cuh and
// unaligned.cuh.
#pragma once

#include <cuda_runtime.h>

#include "core/decode.hpp"
#include "cuda/dequant/args.hpp"
#include "cuda/element.cuh"
#include "cuda/weight/codebooks.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;

// The codebook, one entry per lane and present twice: a look-up is one shuffle, and a width of 16
// makes the shuffle ignore the upper bits of the index.
struct ShuffledCodebook {
  float entry;

  __device__ __forceinline__ explicit ShuffledCodebook(const WeightView &weight)
      : entry(__ldg(device_codebook(weight) + threadIdx.x % kCodebookSize)) {}
  __device__ __forceinline__ float operator[](uint32_t code) const {
    return __shfl_sync(kAllLanes, entry, code, kCodebookSize);
  }
};

// Decodes N weights from the low N/2 bytes of `word`.
template <bool LowNibbleFirst, int N>
__device__ __forceinline__ void decode(uint32_t word, float scale, const ShuffledCodebook &codebook,
                                       float (&out)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float high = multiply_rn(codebook[word >> (4 * i + 4)], scale);
    const float low = multiply_rn(codebook[word >> (4 * i)], scale);
    out[i] = LowNibbleFirst ? low : high;
    out[i + 1] = LowNibbleFirst ? high : low;
  }
}

// Decodes element by element, at the ends of the tensor where elements do not fill a vector.
template <class T, class Scales>
__device__ void dequant_elements(const DequantArgs &args, const ScaleTable<Scales> &table,
                                 int64_t first, int64_t last) {
  const float *codebook = device_codebook(args.weight);
  for (int64_t i = first; i < last; ++i) {
    const float value =
        __ldg(codebook + unpack_code(args.weight.packed, i, Scales::kLowNibbleFirst));
    const auto fetched =
        Scales::template fetch<LoadNc>(args.weight, i >> args.weight.blocksize_log2);
    static_cast<T *>(args.out)[i] =
        from_float<T>(multiply_rn(value, Scales::finish(fetched, table)));
  }
}

}  // namespace
}  // namespace nf4::cuda
