// Quantize, first pass: block scales and 4-bit codes, each input read once.
//
// Cost, 16-bit input, blocksize 64: 2 bytes read and 0.56 written per weight. About 25
// instructions per weight (a binary search of 4 levels in registers is 15 of them).
//
// A thread block takes 4096 elements, the largest quantization block, 16 a thread in two
// runs of 8: a run is one 16-byte load of a 16-bit type and one 4-byte store.
#pragma once

#include <cuda_runtime.h>

#include "core/encode.hpp"
#include "cuda/element.cuh"
#include "cuda/quantize/args.hpp"

namespace nf4::cuda {
namespace {

constexpr int kRun = 8;
constexpr int kRuns = kQuantizeElementsPerBlock / kQuantizeThreads / kRun;
constexpr int kWarps = kQuantizeThreads / 32;

// make_quantizer() by 16 threads: the rank of each entry, then the thresholds. `shared` is
// complete after a barrier.
__device__ __forceinline__ void sort_codebook(const float *codebook, float *sorted,
                                              Quantizer &shared) {
  const int i = threadIdx.x;
  if (i < kCodebookSize) {
    const float entry = __ldg(codebook + i);
    int rank = 0;
    for (int other = 0; other < kCodebookSize; ++other)
      rank += entry_before(__ldg(codebook + other), other, entry, i);
    sorted[rank] = entry;
    shared.codes[rank] = static_cast<uint8_t>(i);
  }
  __syncthreads();
  if (i < kCodebookSize - 1) {
    int low = i;
    while (low >= 0 && sorted[low] == sorted[low + 1]) --low;
    shared.thresholds[i] = low < 0 ? -kLargestFloat : midpoint(sorted[low], sorted[low + 1]);
  }
}

// Ranks by a binary search whose 15 thresholds stay in registers.
struct RegisterQuantizer {
  float threshold[kCodebookSize - 1];
  uint64_t codes;  // 16 nibbles, by rank

  __device__ __forceinline__ explicit RegisterQuantizer(const Quantizer &quantizer) : codes(0) {
#pragma unroll
    for (int i = 0; i < kCodebookSize - 1; ++i) threshold[i] = quantizer.thresholds[i];
#pragma unroll
    for (int i = 0; i < kCodebookSize; ++i)
      codes |= static_cast<uint64_t>(quantizer.codes[i]) << (4 * i);
  }

  __device__ __forceinline__ uint32_t operator()(float x, float inverse) const {
    const float v = normalise(x, inverse);
    const float *t = threshold;
    const bool b8 = v > t[7];
    const bool b4 = v > (b8 ? t[11] : t[3]);
    const bool b2 = v > (b8 ? (b4 ? t[13] : t[9]) : (b4 ? t[5] : t[1]));
    const float low = b4 ? (b2 ? t[6] : t[4]) : (b2 ? t[2] : t[0]);
    const float high = b4 ? (b2 ? t[14] : t[12]) : (b2 ? t[10] : t[8]);
    const bool b1 = v > (b8 ? high : low);
    const int rank = b8 * 8 + b4 * 4 + b2 * 2 + b1;
    return static_cast<uint32_t>(codes >> (4 * rank)) & 15u;
  }
};

// Elements [first, first + 8) as floats; past the end, zeros, which change no absmax.
template <class T>
__device__ __forceinline__ void load_run(const QuantizeArgs &args, int64_t first,
                                         float (&values)[kRun]) {
  const T *in = static_cast<const T *>(args.in) + first;
  if (args.aligned && first + kRun <= args.elements) {
    T raw[kRun];
#pragma unroll
    for (int v = 0; v < kRun / kPerVector<T>; ++v)
      reinterpret_cast<uint4 *>(raw)[v] = __ldcs(reinterpret_cast<const uint4 *>(in) + v);
#pragma unroll
    for (int k = 0; k < kRun; ++k) values[k] = to_float(raw[k]);
    return;
  }
  for (int k = 0; k < kRun; ++k) values[k] = first + k < args.elements ? to_float(in[k]) : 0.0f;
}

// The largest |x| of each quantization block, for the run of this thread: shuffles up to
// a warp, shared memory beyond.
__device__ __forceinline__ float block_absmax(float absmax, int blocksize_log2,
                                              float *warp_absmax) {
  const int threads = min((1 << blocksize_log2) / kRun, kQuantizeThreads);
  for (int distance = min(threads, 32) / 2; distance > 0; distance /= 2)
    absmax = fmaxf(absmax, __shfl_xor_sync(0xffffffffu, absmax, distance));
  if (threads <= 32) return absmax;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) warp_absmax[warp] = absmax;
  __syncthreads();
  const int warps = threads / 32;
  const int first = warp / warps * warps;
  for (int i = 0; i < warps; ++i) absmax = fmaxf(absmax, warp_absmax[first + i]);
  __syncthreads();
  return absmax;
}

__device__ __forceinline__ void store_codes(const QuantizeArgs &args, int64_t first,
                                            const uint32_t (&codes)[kRun]) {
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < kRun; k += 2)
    word |= static_cast<uint32_t>(pack_codes(codes[k], codes[k + 1])) << (4 * k);
  uint8_t *packed = args.packed + first / 2;
  if (args.aligned && first + kRun <= args.elements) {
    *reinterpret_cast<uint32_t *>(packed) = word;
    return;
  }
  for (int k = 0; k < kRun && first + k < args.elements; k += 2)
    packed[k / 2] = static_cast<uint8_t>(word >> (4 * k));
}

template <class T>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_weights(const __grid_constant__ QuantizeArgs args) {
  __shared__ Quantizer shared_quantizer;
  __shared__ float sorted[kCodebookSize];
  __shared__ float warp_absmax[kWarps];

  const int64_t start =
      static_cast<int64_t>(blockIdx.x) * kQuantizeElementsPerBlock + threadIdx.x * kRun;
  float values[kRuns][kRun];
  float absmax[kRuns];
#pragma unroll
  for (int run = 0; run < kRuns; ++run)
    load_run<T>(args, start + run * kQuantizeThreads * kRun, values[run]);
  if (args.codebook != nullptr) {
    sort_codebook(args.codebook, sorted, shared_quantizer);
    __syncthreads();
  }
  const RegisterQuantizer quantizer(args.codebook != nullptr ? shared_quantizer : args.quantizer);
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    float largest = 0;
#pragma unroll
    for (int k = 0; k < kRun; ++k) largest = fmaxf(largest, finite_magnitude(values[run][k]));
    absmax[run] = block_absmax(largest, args.blocksize_log2, warp_absmax);
  }
  // A block of 4096 elements spans both runs.
  if (args.blocksize_log2 == 12) absmax[0] = absmax[1] = fmaxf(absmax[0], absmax[1]);
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    const int64_t first = start + run * kQuantizeThreads * kRun;
    const float inverse = inverse_scale(absmax[run]);
    uint32_t codes[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k)
      codes[k] = first + k < args.elements ? quantizer(values[run][k], inverse) : 0;
    store_codes(args, first, codes);
    if (first < args.elements && first % (int64_t{1} << args.blocksize_log2) == 0)
      args.scales[first >> args.blocksize_log2] = absmax[run];
  }
}

}  // namespace
}  // namespace nf4::cuda
