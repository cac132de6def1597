// Quantize, first pass: block scales and 4-bit codes, each input read once.
//
// Cost, 16-bit input, blocksize 64: 2 bytes read and 0.56 written per weight. About 10
// instructions per weight to convert, compare, scale, look up and pack, and 4 more as its
// share of the loads, shuffles and the reciprocal; an H200 has about 14 per weight to spend
// while memory delivers, so issue slots bound it.
//
// Tried and lost: a binary search over thresholds in registers, which the compiler turned
// into branches (95 instructions per weight, 6 times slower).
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

// The tables of a thread block, in shared memory.
struct Tables {
  Quantizer quantizer;
  Bucket buckets[kBuckets];
  bool crowded;
};

// Copies the format's tables, or makes those of the caller's codebook. Ends in a barrier.
__device__ __forceinline__ void prepare_tables(const QuantizeArgs &args, float *sorted,
                                               Tables &tables) {
  if (args.codebook == nullptr) {
    if (threadIdx.x < kBuckets) tables.buckets[threadIdx.x] = args.buckets.entries[threadIdx.x];
    if (threadIdx.x < kCodebookSize) {
      tables.quantizer.codes[threadIdx.x] = args.quantizer.codes[threadIdx.x];
      if (threadIdx.x < kCodebookSize - 1)
        tables.quantizer.thresholds[threadIdx.x] = args.quantizer.thresholds[threadIdx.x];
    }
    if (threadIdx.x == 0) tables.crowded = args.buckets.crowded;
    __syncthreads();
    return;
  }
  if (threadIdx.x == 0) tables.crowded = false;
  sort_codebook(args.codebook, sorted, tables.quantizer);
  __syncthreads();
  if (threadIdx.x < kBuckets) {
    bool crowded = false;
    tables.buckets[threadIdx.x] = make_bucket(tables.quantizer, threadIdx.x, &crowded);
    if (crowded) tables.crowded = true;
  }
  __syncthreads();
}

// The codes of a run as it is stored. All of `values` are finite.
__device__ __forceinline__ uint32_t encode_run(const Tables &tables, const float (&values)[kRun],
                                               float inverse) {
  const auto *buckets = reinterpret_cast<const char *>(tables.buckets);
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    // The odd element of a pair is in the low nibble, so it comes first.
    const float v = multiply_rn(values[k ^ 1], inverse);
    const Bucket bucket =
        *reinterpret_cast<const Bucket *>(buckets + bucket_offset(bits_of(add_rn(v, 3.0f))));
    uint32_t codes = bucket.codes;
    if (v > bucket.threshold) codes >>= 4;
    word = __funnelshift_r(word, codes, 4);  // the low nibble of codes enters at the top
  }
  return word;
}

// The same for any values and any codebook, by counting thresholds.
__device__ __noinline__ uint32_t encode_run_slowly(const Quantizer &quantizer,
                                                   const float (&values)[kRun], float inverse) {
  uint32_t word = 0;
  for (int k = 0; k < kRun; k += 2) {
    const uint32_t even = encode(quantizer, values[k], inverse);
    const uint32_t odd = encode(quantizer, values[k + 1], inverse);
    word |= static_cast<uint32_t>(pack_codes(even, odd)) << (4 * k);
  }
  return word;
}

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

// The largest |x| of a run: an infinity or NaN if it has one.
__device__ __forceinline__ float run_absmax(const float (&values)[kRun]) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kRun; ++k) largest = max(largest, bits_of(values[k]) & 0x7fffffffu);
  return __uint_as_float(largest);
}

__device__ __forceinline__ float finite_run_absmax(const float (&values)[kRun]) {
  float largest = 0;
  for (int k = 0; k < kRun; ++k) largest = fmaxf(largest, finite_magnitude(values[k]));
  return largest;
}

// Stores the codes of elements [first, first + 8), as far as there are any; the low nibble
// after an odd last element is 0.
__device__ __forceinline__ void store_codes(const QuantizeArgs &args, int64_t first,
                                            uint32_t word) {
  uint8_t *packed = args.packed + first / 2;
  const int64_t left = args.elements - first;
  if (args.aligned && left >= kRun) {
    *reinterpret_cast<uint32_t *>(packed) = word;
    return;
  }
  for (int k = 0; k < kRun && k < left; k += 2) {
    const uint32_t byte = word >> (4 * k) & 0xffu;
    packed[k / 2] = static_cast<uint8_t>(k + 1 < left ? byte : byte & 0xf0u);
  }
}

template <class T>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_weights(const __grid_constant__ QuantizeArgs args) {
  __shared__ Tables tables;
  __shared__ float sorted[kCodebookSize];
  __shared__ float warp_absmax[kWarps];

  const int64_t start = int64_t{blockIdx.x} * kQuantizeElementsPerBlock + threadIdx.x * kRun;
  constexpr int kStride = kQuantizeThreads * kRun;
  float values[kRuns][kRun];
#pragma unroll
  for (int run = 0; run < kRuns; ++run) load_run<T>(args, start + run * kStride, values[run]);
  prepare_tables(args, sorted, tables);

  float absmax[kRuns];
  bool finite[kRuns];
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    float largest = run_absmax(values[run]);
    finite[run] = largest <= kLargestFloat;
    if (!finite[run]) largest = finite_run_absmax(values[run]);
    absmax[run] = block_absmax(largest, args.blocksize_log2, warp_absmax);
  }
  // A block of 4096 elements spans both runs.
  if (args.blocksize_log2 == 12) absmax[0] = absmax[1] = fmaxf(absmax[0], absmax[1]);
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    const int64_t first = start + run * kStride;
    if (first >= args.elements) return;
    const float inverse = inverse_scale(absmax[run]);
    const uint32_t word = finite[run] && !tables.crowded
                              ? encode_run(tables, values[run], inverse)
                              : encode_run_slowly(tables.quantizer, values[run], inverse);
    store_codes(args, first, word);
    const int in_block = threadIdx.x * kRun + run * kStride;
    if ((in_block & ((1 << args.blocksize_log2) - 1)) == 0)
      args.scales[first >> args.blocksize_log2] = absmax[run];
  }
}

}  // namespace
}  // namespace nf4::cuda
