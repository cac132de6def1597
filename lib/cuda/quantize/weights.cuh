// The first kernel of quantize: block scales and 4-bit codes, with each input read once.
//
// Cost, 16-bit input, blocksize 64: 2 bytes read and 0.56 written per weight, and 14 instructions
// per weight: 8 to convert, scale, find the bucket (two shuffles), compare and append the code,
// half of one for the maximum, and a share of the rest. Memory bounds it.
//
// A warp has a tile of 1024 elements as four steps, so that every access is contiguous and four
// 16-byte loads per lane are in flight; work that is not per weight is done once for four runs. A
// CTA is as small as possible, one block of the largest blocksize, 4096, so that the last CTAs
// leave little idle. docs/design/quantize.md has the experiments.
#pragma once

#include <cuda_runtime.h>

#include "core/encode.hpp"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/quantize/absmax.cuh"
#include "cuda/quantize/codebook.cuh"

namespace nf4::cuda {
namespace {

// Loads a run; past the end of the tensor it has zeros, which change no absmax.
template <class Arch, class T, bool Full>
__device__ __forceinline__ Run<T> load_run(const T *in, int64_t count, CachePolicy policy) {
  Run<T> run{};
  if constexpr (Full) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 2); ++i)
      run.vectors[i] = load_once<Arch>(reinterpret_cast<const uint4 *>(in) + i, policy);
  } else {
    T elements[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k) elements[k] = k < count ? in[k] : from_float<T>(0);
    memcpy(&run, elements, sizeof run);
  }
  return run;
}

template <class T>
__device__ __forceinline__ float run_element(const Run<T> &run, int k) {
  const uint32_t *words = reinterpret_cast<const uint32_t *>(&run);
  if constexpr (sizeof(T) == 4) return __uint_as_float(words[k]);
  const uint32_t word = words[k / 2];
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(
        __ushort_as_half(static_cast<unsigned short>(k % 2 == 0 ? word & 0xffffu : word >> 16)));
  return __uint_as_float(k % 2 == 0 ? word << 16 : word & 0xffff0000u);
}

// Stores the codes of a run as far as there are elements; the low nibble after an odd last one is
// 0.
template <bool Full>
__device__ __forceinline__ void store_codes(uint8_t *packed, uint32_t word, int64_t count) {
  if constexpr (Full) {
    *reinterpret_cast<uint32_t *>(packed) = word;
  } else {
#pragma unroll
    for (int k = 0; k < kRun; k += 2) {
      if (k >= count) break;
      const uint32_t byte = word >> (4 * k) & 0xffu;
      packed[k / 2] = static_cast<uint8_t>(k + 1 < count ? byte : byte & 0xf0u);
    }
  }
}

// The codes of a run whose elements are all finite, if the buckets tell codes apart. Two shuffles
// find the bucket: they use the last five bits of the number in the low bits of the sum.
template <class T>
__device__ __forceinline__ uint32_t encode_run(const Run<T> &run, float inverse, Bucket entry) {
  uint32_t word = 0;
#pragma unroll
  for (int i = kRun - 1; i >= 0; --i) {
    // Appends from the highest nibble down; the even element of a byte is in the higher nibble.
    const float v = multiply_rn(run_element(run, i ^ 1), inverse);
    const int bucket = __float_as_int(__fmaf_rd(v, kBucketsPerUnit, kIntegerInLowBits));
    const float threshold = __shfl_sync(kFullWarp, entry.threshold, bucket);
    const uint32_t codes = __shfl_sync(kFullWarp, entry.codes, bucket);
    word = __funnelshift_l(v > threshold ? codes << 4 : codes, word, 4);
  }
  return word;
}

// The same for any values and any codebook, by counting thresholds. It reads the elements again,
// for the reason given at finite_run_max().
template <class T>
__device__ __noinline__ uint32_t encode_slowly(const Quantizer &quantizer, const T *in,
                                               int64_t count, float inverse) {
  uint32_t word = 0;
  for (int k = 0; k < min(count, int64_t{kRun}); ++k)
    word |= encode(quantizer, to_float(in[k]), inverse) << (4 * (k ^ 1));
  return word;
}

// Quantizes the elements of one CTA. With `Full`, all of them are in the tensor, and aligned.
template <class Arch, class T, bool CallersCodebook, bool Full>
__device__ __forceinline__ void quantize_cta(const QuantizeArgs &args) {
  const int lane = threadIdx.x % 32;
  const int tile = threadIdx.x / 32 * kTile;
  const int64_t start = int64_t{blockIdx.x} * kQuantizeCtaTile;
  const int64_t count = args.elements - start - tile - lane * kRun;  // from the first run on
  const T *in = static_cast<const T *>(args.in) + start + (tile + lane * kRun);
  const CachePolicy once = evict_first<Arch>();
  Run<T> runs[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    runs[step] = load_run<Arch, T, Full>(in + step * kStep, count - step * kStep, once);
  const Tables &tables = get_tables<CallersCodebook>(args);
  const Bucket entry = tables.buckets[lane];

  uint32_t maxima[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) maxima[step] = run_max(runs[step]);
  float absmax = warp_absmax<T>(maxima, args.blocksize_log2);
  const bool finite = !__any_sync(kFullWarp, !(absmax <= kLargestFloat));
  if (!finite) {
    for (int step = 0; step < kSteps; ++step)
      maxima[step] = finite_run_max(in + step * kStep, count - step * kStep);
    absmax = warp_absmax<T>(maxima, args.blocksize_log2);
  }
  if ((1 << args.blocksize_log2) > kTile) absmax = across_warps(absmax, args.blocksize_log2);

  // The lane in which a block begins stores its scale.
  __shared__ float scales[kMaxScales];
  const int own = tile + lane % kSteps * kStep + lane / kSteps * (kSteps * kRun);
  if ((own & ((1 << args.blocksize_log2) - 1)) == 0) {
    if (Full || start + own < args.elements)
      args.scales[(start >> args.blocksize_log2) + (own >> args.blocksize_log2)] = absmax;
    scales[own >> args.blocksize_log2] = absmax;
  }

  const float lane_inverse = __frcp_rn(fmaxf(absmax, kSmallestNormal));  // inverse_scale(absmax)
  const bool slowly = !finite || (CallersCodebook && tables.crowded);
  uint8_t *packed = args.packed + start / 2 + (tile + lane * kRun) / 2;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const float inverse = __shfl_sync(kFullWarp, lane_inverse, step, kSteps);
    const int64_t left = count - step * kStep;
    const uint32_t word = slowly ? encode_slowly(tables.quantizer, in + step * kStep, left, inverse)
                                 : encode_run(runs[step], inverse, entry);
    store_codes<Full>(packed + step * (kStep / 2), word, left);
  }
  if (args.partial_sums == nullptr) return;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const double sum = sum_scales(scales, kQuantizeCtaTile >> args.blocksize_log2);
  if (lane == 0) args.partial_sums[blockIdx.x] = sum;
}

// The threads that a multiprocessor should hold: with 1024, fp32 would spill its loads. With 1024,
// fp16 spills 36 bytes per thread, and a caller's codebook up to 40.
template <class T>
constexpr int kResident = sizeof(T) == 4 ? 768 : 1024;

template <class Arch, class T, bool CallersCodebook>
__global__ void __launch_bounds__(kQuantizeThreads, resident_ctas(kResident<T>, kQuantizeThreads))
    quantize_weights(const __grid_constant__ QuantizeArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  if (args.aligned && (blockIdx.x + int64_t{1}) * kQuantizeCtaTile <= args.elements)
    quantize_cta<Arch, T, CallersCodebook, true>(args);
  else
    quantize_cta<Arch, T, CallersCodebook, false>(args);
}

}  // namespace
}  // namespace nf4::cuda
