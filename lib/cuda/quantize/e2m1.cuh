// Quantizes to MXFP4 and NVFP4. A lane has a run of 8 elements; the 2 or 4 lanes of a block are
// neighbours, and each of them computes its scale.
//
// Cost, 16-bit input, blocks of 32: 2 bytes read and 0.53 written per weight, and about 20
// instructions (multiply, 7 comparisons, half a conversion). It takes three times as long as a copy
// of these bytes (docs/design/quantize.md), and has not been profiled.
#pragma once

#include <cuda_runtime.h>

#include "core/encode_e2m1.hpp"
#include "cuda/ptx/pdl.cuh"
#include "cuda/quantize/weights.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

// The scale of a block, by which elements are divided.
class BlockScale {
 public:
  __device__ __forceinline__ BlockScale(const E2m1QuantizeArgs &args, int64_t block, float absmax) {
    const WeightView &weight = args.weight;
    if (weight.scale_bytes == ScaleBytes::kE8M0) {
      byte_ = e8m0_scale(absmax, args.scale_rule);
      scale_ = __uint_as_float(e8m0_bits(byte_));
      inverse_ = __uint_as_float(byte_ == 254 ? 1u << 22 : (254 - byte_) << 23);
      return;
    }
    const int64_t part = ByteScales::part_of(block, weight.global_blocks);
    const float global = weight.nested_absmax[part];
    byte_ = e4m3_scale(absmax, global, weight.global_divides);
    scale_ = global_scaled(e4m3_value(byte_), global, weight.global_divides);
    inverse_ = __frcp_rn(scale_);
  }

  __device__ __forceinline__ uint32_t byte() const { return byte_; }
  // Whether quotient() has what divide_rn has, as far as codes are concerned.
  __device__ __forceinline__ bool is_ordinary() const {
    return fabsf(scale_) > 0x1p-90f && fabsf(scale_) < 0x1p90f;
  }
  __device__ __forceinline__ float divide(float x) const { return divide_rn(x, scale_); }

  // The second correction of a quotient, with an inverse that is rounded to nearest, rounds it to
  // nearest (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990). A
  // correction of an infinite quotient is NaN.
  __device__ __forceinline__ float quotient(float x) const {
    const float first = multiply_rn(x, inverse_);
    const float second = corrected(x, first), third = corrected(x, second);
    return third == third ? third : first;
  }

 private:
  __device__ __forceinline__ float corrected(float x, float quotient) const {
    return __fmaf_rn(__fmaf_rn(-scale_, quotient, x), inverse_, quotient);
  }

  uint32_t byte_;
  float scale_;
  float inverse_;
};

template <class Arch, class T>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_e2m1(const __grid_constant__ E2m1QuantizeArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const int64_t first = (int64_t{blockIdx.x} * kQuantizeThreads + threadIdx.x) * kRun;
  // Blocks are whole runs. A lane past the end has zeros, and its block is its own.
  const bool exists = first < args.elements;
  const T *in = static_cast<const T *>(args.in) + first;
  Run<T> run{};
  if (exists)
    run = args.aligned ? load_run<Arch, T, true>(in, kRun, evict_first<Arch>())
                       : load_run<Arch, T, false>(in, kRun, evict_first<Arch>());
  float values[kRun];
  float absmax = 0;
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    values[k] = run_element(run, k);
    absmax = fmaxf(absmax, finite_magnitude(values[k]));
  }
  const int lanes = 1 << args.weight.blocksize_log2 >> 3;
  for (int distance = 1; distance < lanes; distance *= 2)
    absmax = fmaxf(absmax, __shfl_xor_sync(kFullWarp, absmax, distance));
  if (!exists) return;

  const int64_t block = first >> args.weight.blocksize_log2;
  const BlockScale scale(args, block, absmax);
  if (threadIdx.x % lanes == 0) args.scales[block] = static_cast<uint8_t>(scale.byte());
  const bool ordinary = scale.is_ordinary();
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    const float quotient = ordinary ? scale.quotient(values[k]) : scale.divide(values[k]);
    word |= e2m1_code(quotient) << (4 * k);
  }
  uint8_t *packed = args.packed + first / 2;
  if (args.aligned) {
    *reinterpret_cast<uint32_t *>(packed) = word;
  } else {
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) packed[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

}  // namespace
}  // namespace nf4::cuda
