// Quantize, first pass: block scales and 4-bit codes, each input read once.
//
// Cost, 16-bit input, blocksize 64: 2 bytes read and 0.56 written per weight. 18
// instructions per weight as ncu counts them: 10 to convert, compare, scale, look up and
// pack, and a share of the loads, shuffles, tables and the reciprocal. An H200 has about 14
// to spend per weight while memory delivers, so instructions bound it, with latency: issue
// slots are busy half of the time.
//
// A thread block takes 4096 elements, the largest quantization block, and a thread 16 in a
// row: 16-bit loads use every byte of a 32-byte sector, and the work that is not per weight
// (absmax over lanes, reciprocal, addresses) is shared by 16.
//
// Log, 14336x4096 bf16 nested on an H200, all launches together; a read of the input alone
// takes 29 us:
//   189 us  a binary search over thresholds in registers (predicted 25 instructions per
//           weight; the compiler made it branches, and 95)
//   108 us  buckets, two runs of 8 a thread, a division for the reciprocal
//   107 us  one run of 16, a reciprocal (predicted 60; ncu: stores to L2 at 58%, which were
//           the values, kept in local memory for a slow path that took them by reference)
//   107 us  the tables from global memory instead of arguments, to no effect
//    75 us  slow paths that read their elements again; 18 instructions per weight, issue
//           slots busy half of the time, 18.6 of 26 us in this kernel at 4096x4096
#pragma once

#include <cuda_runtime.h>

#include "core/encode.hpp"
#include "cuda/element.cuh"
#include "cuda/quantize/args.hpp"

namespace nf4::cuda {
namespace {

constexpr int kRun = kQuantizeElementsPerBlock / kQuantizeThreads;
static_assert(kRun == 16);
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

// Those of the formats, made by the compiler. In global memory, not in the arguments:
// each thread reads another word, which the constant cache would serve one by one.
__device__ const Tables kNf4Tables = make_tables(kNf4Codebook);
__device__ const Tables kFp4Tables = make_tables(kFp4Codebook);

// Copies the format's tables, or makes those of the caller's codebook. Ends in a barrier.
__device__ __forceinline__ void prepare_tables(const QuantizeArgs &args, float *sorted,
                                               Tables &tables) {
  if (args.codebook == nullptr) {
    const Tables &own = args.format == NF4_FORMAT_FP4 ? kFp4Tables : kNf4Tables;
    static_assert(sizeof(Tables) % 4 == 0 && sizeof(Tables) / 4 <= kQuantizeThreads);
    if (threadIdx.x < sizeof(Tables) / 4)
      reinterpret_cast<uint32_t *>(&tables)[threadIdx.x] =
          __ldg(reinterpret_cast<const uint32_t *>(&own) + threadIdx.x);
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

// The codes of a run as they are stored, 8 in a word.
struct Codes {
  uint32_t words[kRun / 8];
};

// All of `values` are finite, and no bucket is crowded.
__device__ __forceinline__ Codes encode_run(const Tables &tables, const float (&values)[kRun],
                                            float inverse) {
  const auto *buckets = reinterpret_cast<const char *>(tables.buckets);
  Codes codes{};
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    // The odd element of a pair is in the low nibble, so it comes first.
    const float v = multiply_rn(values[k ^ 1], inverse);
    const Bucket bucket = *reinterpret_cast<const Bucket *>(
        buckets + bucket_offset(__float_as_uint(add_rn(v, 3.0f))));
    const uint32_t code = v > bucket.threshold ? bucket.codes >> 4 : bucket.codes;
    uint32_t &word = codes.words[k / 8];
    word = __funnelshift_r(word, code, 4);  // the low nibble of code enters at the top
  }
  return codes;
}

// The slow paths, for what is not finite and for crowded tables, read their elements again.
// Given `values`, they made the compiler keep those in local memory for every thread.

// The same codes for any values and any codebook, by counting thresholds.
template <class T>
__device__ __noinline__ Codes encode_slowly(const Quantizer &quantizer, const T *in, int count,
                                            float inverse) {
  Codes codes{};
  for (int k = 0; k < count; ++k) {
    const uint32_t code = encode(quantizer, to_float(in[k]), inverse);
    codes.words[k / 8] |= code << (4 * (k % 8 ^ 1));
  }
  return codes;
}

template <class T>
__device__ __noinline__ float absmax_slowly(const T *in, int count) {
  float largest = 0;
  for (int k = 0; k < count; ++k) largest = fmaxf(largest, finite_magnitude(to_float(in[k])));
  return largest;
}

// Elements [first, first + 16) as floats; past the end, zeros, which change no absmax.
template <class T>
__device__ __forceinline__ void load_run(const QuantizeArgs &args, int64_t first,
                                         float (&values)[kRun]) {
  const T *in = static_cast<const T *>(args.in) + first;
  if (args.aligned && first + kRun <= args.elements) {
    alignas(16) T raw[kRun];
#pragma unroll
    for (int v = 0; v < kRun / kPerVector<T>; ++v)
      reinterpret_cast<uint4 *>(raw)[v] = __ldcs(reinterpret_cast<const uint4 *>(in) + v);
#pragma unroll
    for (int k = 0; k < kRun; ++k) values[k] = to_float(raw[k]);
    return;
  }
#pragma unroll
  for (int k = 0; k < kRun; ++k) values[k] = first + k < args.elements ? to_float(in[k]) : 0.0f;
}

// max(a, |b|), which is NaN if either is.
__device__ __forceinline__ float max_magnitude(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(fabsf(b)));
  return result;
#else
  // As integers, magnitudes are in order, and NaN is above infinity.
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b) & 0x7fffffffu));
#endif
}

// The largest |x| of a run: an infinity or NaN if it has one.
__device__ __forceinline__ float run_absmax(const float (&values)[kRun]) {
  float largest = 0;
#pragma unroll
  for (int k = 0; k < kRun; ++k) largest = max_magnitude(largest, values[k]);
  return largest;
}

// The absmax of each thread's quantization block: shuffles up to a warp, shared memory
// beyond. A barrier for blocksizes above 512.
__device__ __forceinline__ float block_absmax(float absmax, int blocksize_log2,
                                              float *warp_absmax) {
  const int threads = (1 << blocksize_log2) / kRun;  // of one quantization block
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    if (threads > distance) absmax = fmaxf(absmax, __shfl_xor_sync(0xffffffffu, absmax, distance));
  if (threads <= 32) return absmax;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) warp_absmax[warp] = absmax;
  __syncthreads();
  const int warps = threads / 32;
  const int first = warp / warps * warps;
  for (int i = 0; i < warps; ++i) absmax = fmaxf(absmax, warp_absmax[first + i]);
  return absmax;
}

// Stores the codes of elements [first, first + 16), as far as there are any; the low nibble
// after an odd last element is 0.
__device__ __forceinline__ void store_codes(const QuantizeArgs &args, int64_t first, Codes codes) {
  uint8_t *packed = args.packed + first / 2;
  const int64_t left = args.elements - first;
  if (args.aligned && left >= kRun) {
    *reinterpret_cast<uint2 *>(packed) = {codes.words[0], codes.words[1]};
    return;
  }
#pragma unroll
  for (int k = 0; k < kRun; k += 2) {
    if (k >= left) break;
    const uint32_t byte = codes.words[k / 8] >> (4 * (k % 8)) & 0xffu;
    packed[k / 2] = static_cast<uint8_t>(k + 1 < left ? byte : byte & 0xf0u);
  }
}

template <class T>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_weights(const __grid_constant__ QuantizeArgs args) {
  __shared__ Tables tables;
  __shared__ float sorted[kCodebookSize];
  __shared__ float warp_absmax[kWarps];

  const int in_block = threadIdx.x * kRun;
  const int64_t first = int64_t{blockIdx.x} * kQuantizeElementsPerBlock + in_block;
  float values[kRun];
  load_run<T>(args, first, values);
  prepare_tables(args, sorted, tables);

  const T *in = static_cast<const T *>(args.in) + first;
  const int count = static_cast<int>(min(args.elements - first, int64_t{kRun}));
  float absmax = run_absmax(values);
  const bool finite = absmax <= kLargestFloat;
  if (!finite) absmax = absmax_slowly(in, count);
  absmax = block_absmax(absmax, args.blocksize_log2, warp_absmax);
  if (count <= 0) return;

  const float inverse = __frcp_rn(fmaxf(absmax, kSmallestNormal));  // inverse_scale(absmax)
  const Codes codes = finite && !tables.crowded
                          ? encode_run(tables, values, inverse)
                          : encode_slowly(tables.quantizer, in, count, inverse);
  store_codes(args, first, codes);
  if ((in_block & ((1 << args.blocksize_log2) - 1)) == 0)
    args.scales[first >> args.blocksize_log2] = absmax;
}

}  // namespace
}  // namespace nf4::cuda
