// Dequantize: both quantizations undone in one pass, no intermediate buffer.
//
// Cost, nested, 16-bit output, blocksize 64: 0.516 bytes read and 2 written per weight.
// About 5 instructions per weight (shift, shuffle, multiply, half a conversion, and its
// share of the rest), so memory bounds it.
//
// One thread block for each 8 tiles and no loop: a persistent or grid-stride grid lets
// multiprocessors drift apart, which widens the window of addresses in flight and costs
// 8-10% at large sizes on an H200. A warp owns a tile of 512 or 1024 elements, so that two
// or four (16-bit) or four (32-bit) loads a lane are in flight, each warp-wide access is
// contiguous, and the scales of the tile, at most 32, are computed one per lane and shared
// by shuffles.
//
// Log, bf16 nested on an H200, microseconds at 4096x1024 / 4096x4096 / 14336x4096; the
// fastest stream of the same bytes 4.26 / 12.0 / 36.8:
//   5.01 / 14.0 / 41.6   scales loaded after the barrier that publishes the 8-bit code
//   4.75 / 12.4 / 37.9   all loads before it; what a thread block has in common in uniform
//                        registers (predicted: one memory latency less, 0.5 us)
//   4.46 / 12.0 / 37.5   tiles of 1024 with 4 MB of prefetch; at 11008x4096 and above, and
//                        for fp32, 0.5-2% slower than tiles of 512, hence both
//   5.01 / 12.4 / 37.4   blocksizes 64 and 256 as constants: lost (predicted 10% fewer
//                        instructions to matter at the small size)
//   4.59 / 12.3 / 37.5   no cache policies: no difference
#pragma once

#include <cuda_runtime.h>

#include "core/decode.hpp"
#include "cuda/dequant/args.hpp"
#include "cuda/element.cuh"
#include "cuda/memory.cuh"
#include "cuda/tables.cuh"

namespace nf4::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;

// 4 MB of weights: 8 MB and more were evicted before use on an H200.
constexpr int64_t kPrefetchElements = int64_t{8} << 20;

// The scales of a weight, as a thread block reads them: fetch() starts the loads, and
// scale() finishes the arithmetic once share_code() has brought the 8-bit code to shared
// memory, where a lookup by 32 lanes is cheap. Apart, so that the latencies overlap.
template <bool Nested>
struct Scales {
  struct Fetched {
    float value;  // flat: the scale; nested: nested_absmax
    uint8_t q;
  };

  const DequantArgs &args;
  float *code;  // shared, 256
  float offset;

  __device__ __forceinline__ Scales(const DequantArgs &arguments, float *shared_code)
      : args(arguments), code(shared_code), offset(0) {}

  __device__ __forceinline__ Fetched fetch(int64_t block) const {
    if constexpr (Nested)
      return {__ldg(args.nested_absmax + (block >> args.nested_blocksize_log2)),
              __ldg(static_cast<const uint8_t *>(args.absmax) + block)};
    else
      return {__ldg(static_cast<const float *>(args.absmax) + block), 0};
  }

  // A barrier: all threads of the block, which are `Threads`, call it.
  template <int Threads>
  __device__ __forceinline__ void share_code() {
    if constexpr (Nested) {
      offset = __ldg(args.nested_offset);
#pragma unroll
      for (int i = 0; i < kScaleCodeSize; i += Threads)
        if (Threads <= kScaleCodeSize || threadIdx.x < kScaleCodeSize)
          code[i + threadIdx.x] = __ldg(args.nested_code + i + threadIdx.x);
      __syncthreads();
    }
  }

  __device__ __forceinline__ float scale(Fetched fetched) const {
    if constexpr (Nested)
      return nested_scale(code[fetched.q], fetched.value, offset);
    else
      return fetched.value;
  }
  __device__ __forceinline__ float operator()(int64_t block) const { return scale(fetch(block)); }
};

// The codebook, one entry per lane and twice over: a lookup is one shuffle, and a width
// of 16 makes it ignore the upper bits of the index.
struct ShuffledCodebook {
  float entry;

  __device__ __forceinline__ explicit ShuffledCodebook(const DequantArgs &args)
      : entry(__ldg(device_codebook(args.codebook, args.format) + threadIdx.x % kCodebookSize)) {}
  __device__ __forceinline__ float operator[](uint32_t code) const {
    return __shfl_sync(kAllLanes, entry, code, kCodebookSize);
  }
};

// N weights from the low N/2 bytes of `word`, high nibble first.
template <int N>
__device__ __forceinline__ void decode(uint32_t word, float scale, const ShuffledCodebook &codebook,
                                       float (&out)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    out[i] = multiply_rn(codebook[word >> (4 * i + 4)], scale);
    out[i + 1] = multiply_rn(codebook[word >> (4 * i)], scale);
  }
}

// One element after another: what does not fill a vector, at the ends of the tensor.
template <class T, bool Nested>
__device__ void dequant_elements(const DequantArgs &args, const Scales<Nested> &scales,
                                 int64_t first, int64_t last) {
  const float *codebook = device_codebook(args.codebook, args.format);
  for (int64_t i = first; i < last; ++i) {
    const float value = __ldg(codebook + unpack_code(args.packed, i));
    static_cast<T *>(args.out)[i] =
        from_float<T>(multiply_rn(value, scales(i >> args.blocksize_log2)));
  }
}

// The codes of a lane's vector in each step of a tile, all of it in the tensor.
template <class Arch, class T, int Steps>
__device__ __forceinline__ void load_codes(const uint8_t *tile, CachePolicy policy,
                                           uint32_t (&codes)[Steps]) {
  const int lane = threadIdx.x % 32;
  const uint32_t *words = reinterpret_cast<const uint32_t *>(tile);
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int step = 0; step < Steps; ++step)
      codes[step] = load_streamed<Arch>(words + step * 32 + lane, policy);
  } else {
    // A word is two vectors of fp32. Loads of 4 bytes are faster than twice as many of 2.
    uint32_t loaded[Steps / 2];
#pragma unroll
    for (int i = 0; i < Steps / 2; ++i)
      loaded[i] = load_streamed<Arch>(words + i * 32 + lane, policy);
#pragma unroll
    for (int step = 0; step < Steps; ++step)
      codes[step] =
          __shfl_sync(kAllLanes, loaded[step / 2], step % 2 * 16 + lane / 2) >> (lane % 2 * 16);
  }
}

// The codes of one vector, of which the tensor has all.
template <class Arch, class T>
__device__ __forceinline__ uint32_t load_vector_codes(const uint8_t *packed, CachePolicy policy) {
  if constexpr (sizeof(T) == 2)
    return load_streamed<Arch>(reinterpret_cast<const uint32_t *>(packed), policy);
  else
    return load_streamed<Arch>(reinterpret_cast<const uint16_t *>(packed), policy);
}

// Thread 0 asks L2 for the weights and scales of a thread block that starts later.
template <class Arch, bool Nested, int kElements>
__device__ __forceinline__ void prefetch(const DequantArgs &args) {
  if constexpr (Arch::kBulkPrefetch) {
    constexpr int64_t kBlocksAhead = kPrefetchElements / kElements;
    const int64_t ahead = int64_t{blockIdx.x} + kBlocksAhead;
    // The last thread block may be partial, so its data is left alone.
    if (!args.prefetch || threadIdx.x != 0 || ahead + 1 >= gridDim.x) return;
    prefetch_l2<Arch>(args.packed + ahead * (kElements / 2), kElements / 2);
    const int scale_bytes = (kElements >> args.blocksize_log2) * (Nested ? 1 : 4);
    if (scale_bytes % 16 == 0)
      prefetch_l2<Arch>(static_cast<const uint8_t *>(args.absmax) + ahead * scale_bytes,
                        scale_bytes);
  }
}

// The elements of one thread block. `Full`: the tensor goes on past their end, so
// nothing is checked. What the thread block has in common is 64-bit and computed once per
// warp (the uniform datapath); what a thread adds to it is 32-bit.
template <class Arch, class T, bool Nested, int Threads, int Tile, bool Full>
__device__ __forceinline__ void dequant_block(const DequantArgs &args, Scales<Nested> &scales) {
  constexpr int kVector = kPerVector<T>;
  constexpr int kStride = 32 * kVector;  // elements that a warp takes in a step
  constexpr int kSteps = Tile / kStride;
  constexpr int kElements = Threads / 32 * Tile;

  const int64_t start = int64_t{blockIdx.x} * kElements;
  const int lane = threadIdx.x % 32;
  const int tile = threadIdx.x / 32 * Tile;
  const int first = tile + lane * kVector;
  const CachePolicy once = evict_first<Arch>();
  const auto has_vector = [&](int step) {
    return Full || start + first + step * kStride + kVector <= args.elements;
  };

  // All loads of the tile, then what turns them into numbers.
  uint32_t words[kSteps];
  if constexpr (Full) {
    load_codes<Arch, T>(args.packed + start / 2 + tile / 2, once, words);
  } else {
    const uint8_t *in = args.packed + start / 2 + first / 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      words[step] =
          has_vector(step) ? load_vector_codes<Arch, T>(in + step * kStride / 2, once) : 0;
  }
  const int tile_blocks = max(Tile >> args.blocksize_log2, 1);
  const int64_t block =
      (start >> args.blocksize_log2) + ((tile >> args.blocksize_log2) + (lane & (tile_blocks - 1)));
  const auto fetched = scales.fetch(Full ? block : min(block, args.blocks - 1));
  const ShuffledCodebook codebook(args);
  prefetch<Arch, Nested, kElements>(args);
  scales.template share_code<Threads>();
  const float lane_scale = scales.scale(fetched);

  uint4 *out = reinterpret_cast<uint4 *>(args.out) + start / kVector + first / kVector;
  const CachePolicy output = args.keep_output ? evict_normal<Arch>() : once;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int in_tile = step * kStride + lane * kVector;
    const float scale = __shfl_sync(kAllLanes, lane_scale, in_tile >> args.blocksize_log2);
    float values[kVector];
    decode(words[step], scale, codebook, values);
    if (has_vector(step))
      store_streamed<Arch>(out + step * 32, pack_vector<T>(values), output);
    else
      dequant_elements<T>(args, scales, start + tile + in_tile, args.elements);
  }
}

// For out on 16 bytes and packed on 4.
template <class Arch, class T, bool Nested, int Threads, int Tile, int Resident>
__global__ void __launch_bounds__(Threads, resident_blocks(Resident, Threads))
    dequant_aligned(const __grid_constant__ DequantArgs args) {
  wait_for_predecessor<Arch>();
  start_dependents<Arch>();
  __shared__ float code[Nested ? kScaleCodeSize : 1];
  Scales<Nested> scales(args, code);
  if ((blockIdx.x + int64_t{1}) * (Threads / 32 * Tile) <= args.elements)
    dequant_block<Arch, T, Nested, Threads, Tile, true>(args, scales);
  else
    dequant_block<Arch, T, Nested, Threads, Tile, false>(args, scales);
}

constexpr DequantLayout kUnalignedLayout = dequant_layout(kUnaligned, 0);
constexpr int kUnalignedThreads = kUnalignedLayout.threads;

// For any alignment: vectors start at the 16-byte boundaries of out, wherever that is in
// the weight, so a vector may start at an odd element and straddle two blocks.
template <class Arch, class T, bool Nested>
__global__ void __launch_bounds__(kUnalignedThreads,
                                  resident_blocks(kUnalignedLayout.resident, kUnalignedThreads))
    dequant_unaligned(const __grid_constant__ DequantArgs args) {
  wait_for_predecessor<Arch>();
  start_dependents<Arch>();
  constexpr int kVector = kPerVector<T>;
  constexpr int kSteps = kUnalignedLayout.elements() / kUnalignedThreads / kVector;
  __shared__ float code[Nested ? kScaleCodeSize : 1];
  __shared__ float codebook[kCodebookSize];
  if (threadIdx.x < kCodebookSize)
    codebook[threadIdx.x] = __ldg(device_codebook(args.codebook, args.format) + threadIdx.x);
  Scales<Nested> scales(args, code);
  scales.template share_code<kUnalignedThreads>();
  __syncthreads();

  const int64_t start = int64_t{blockIdx.x} * kUnalignedLayout.elements() - args.shift;
  for (int step = 0; step < kSteps; ++step) {
    const int64_t i = start + (step * kUnalignedThreads + threadIdx.x) * kVector;
    if (i < 0 || i + kVector > args.elements) {
      dequant_elements<T>(args, scales, max(i, int64_t{0}), min(i + kVector, args.elements));
      continue;
    }
    const int64_t last_block = (i + kVector - 1) >> args.blocksize_log2;
    const float scale = scales(i >> args.blocksize_log2);
    const float last_scale = scales(last_block);
    float values[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const bool in_last = (i + k) >> args.blocksize_log2 == last_block;
      values[k] =
          multiply_rn(codebook[unpack_code(args.packed, i + k)], in_last ? last_scale : scale);
    }
    store_streamed<Arch>(reinterpret_cast<uint4 *>(static_cast<T *>(args.out) + i),
                         pack_vector<T>(values), evict_first<Arch>());
  }
}

template <class Arch, class T, bool Nested, DequantShape Shape>
const void *aligned_kernel() {
  constexpr DequantLayout kLayout = dequant_layout(Shape, sizeof(T));
  return (const void *)
      dequant_aligned<Arch, T, Nested, kLayout.threads, kLayout.tile, kLayout.resident>;
}

// The kernels of a family for one dtype, flat or nested, by DequantShape.
template <class Arch, class T, bool Nested>
void set_kernels(const void *(&kernels)[kDequantShapes]) {
  kernels[kUnaligned] = (const void *)dequant_unaligned<Arch, T, Nested>;
  kernels[kSmall] = aligned_kernel<Arch, T, Nested, kSmall>();
  kernels[kMedium] = aligned_kernel<Arch, T, Nested, kMedium>();
  kernels[kLarge] = aligned_kernel<Arch, T, Nested, kLarge>();
}

template <class Arch>
DequantFamily dequant_family(Family family) {
  DequantFamily result{family, {}};
  set_kernels<Arch, float, false>(result.kernels[NF4_DTYPE_FP32 - 1][0]);
  set_kernels<Arch, float, true>(result.kernels[NF4_DTYPE_FP32 - 1][1]);
  set_kernels<Arch, __half, false>(result.kernels[NF4_DTYPE_FP16 - 1][0]);
  set_kernels<Arch, __half, true>(result.kernels[NF4_DTYPE_FP16 - 1][1]);
  set_kernels<Arch, __nv_bfloat16, false>(result.kernels[NF4_DTYPE_BF16 - 1][0]);
  set_kernels<Arch, __nv_bfloat16, true>(result.kernels[NF4_DTYPE_BF16 - 1][1]);
  return result;
}

}  // namespace
}  // namespace nf4::cuda
