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

  // A barrier: all threads of the block call it.
  __device__ __forceinline__ void share_code() {
    if constexpr (Nested) {
      static_assert(kDequantThreads == kScaleCodeSize);
      offset = __ldg(args.nested_offset);
      code[threadIdx.x] = __ldg(args.nested_code + threadIdx.x);
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

// The type whose bits hold the codes of one 16-byte vector of output.
template <class T>
struct PackedVector;
template <>
struct PackedVector<float> {
  using type = uint16_t;
};
template <>
struct PackedVector<__half> {
  using type = uint32_t;
};
template <>
struct PackedVector<__nv_bfloat16> {
  using type = uint32_t;
};

// Thread 0 asks L2 for the weights and scales of a thread block that starts later.
template <class Arch, bool Nested, DequantShape Shape>
__device__ __forceinline__ void prefetch(const DequantArgs &args) {
  if constexpr (Arch::kBulkPrefetch) {
    constexpr int kElements = elements_per_block(Shape);
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
template <class Arch, class T, bool Nested, DequantShape Shape, bool Full>
__device__ __forceinline__ void dequant_block(const DequantArgs &args, Scales<Nested> &scales) {
  constexpr int kVector = kPerVector<T>;
  constexpr int kTile = elements_per_block(Shape) / (kDequantThreads / 32);
  constexpr int kStride = 32 * kVector;  // elements that a warp takes in a step
  constexpr int kSteps = kTile / kStride;
  using Packed = typename PackedVector<T>::type;

  const int64_t start = int64_t{blockIdx.x} * elements_per_block(Shape);
  const int lane = threadIdx.x % 32;
  const int tile = threadIdx.x / 32 * kTile;
  const int first = tile + lane * kVector;
  const CachePolicy once = evict_first<Arch>();
  const auto has_vector = [&](int step) {
    return Full || start + first + step * kStride + kVector <= args.elements;
  };

  // All loads of the tile, then what turns them into numbers.
  const Packed *in =
      reinterpret_cast<const Packed *>(args.packed) + start / kVector + first / kVector;
  uint32_t words[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    words[step] = has_vector(step) ? load_streamed<Arch>(in + step * 32, once) : 0;
  const int tile_blocks = max(kTile >> args.blocksize_log2, 1);
  const int64_t block =
      (start >> args.blocksize_log2) + ((tile >> args.blocksize_log2) + (lane & (tile_blocks - 1)));
  const auto fetched = scales.fetch(Full ? block : min(block, args.blocks - 1));
  const ShuffledCodebook codebook(args);
  prefetch<Arch, Nested, Shape>(args);
  scales.share_code();
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

// For out on a 16-byte boundary and packed on that of PackedVector.
template <class Arch, class T, bool Nested, DequantShape Shape>
__global__ void __launch_bounds__(kDequantThreads, kThreadsPerMultiprocessor / kDequantThreads)
    dequant_aligned(const __grid_constant__ DequantArgs args) {
  wait_for_predecessor<Arch>();
  start_dependents<Arch>();
  __shared__ float code[Nested ? kScaleCodeSize : 1];
  Scales<Nested> scales(args, code);
  if ((blockIdx.x + int64_t{1}) * elements_per_block(Shape) <= args.elements)
    dequant_block<Arch, T, Nested, Shape, true>(args, scales);
  else
    dequant_block<Arch, T, Nested, Shape, false>(args, scales);
}

// For any alignment: vectors start at the 16-byte boundaries of out, wherever that is in
// the weight, so a vector may start at an odd element and straddle two blocks.
template <class Arch, class T, bool Nested>
__global__ void __launch_bounds__(kDequantThreads, kThreadsPerMultiprocessor / kDequantThreads)
    dequant_unaligned(const __grid_constant__ DequantArgs args) {
  wait_for_predecessor<Arch>();
  start_dependents<Arch>();
  constexpr int kVector = kPerVector<T>;
  constexpr int kSteps = elements_per_block(kUnaligned) / kDequantThreads / kVector;
  __shared__ float code[Nested ? kScaleCodeSize : 1];
  __shared__ float codebook[kCodebookSize];
  if (threadIdx.x < kCodebookSize)
    codebook[threadIdx.x] = __ldg(device_codebook(args.codebook, args.format) + threadIdx.x);
  Scales<Nested> scales(args, code);
  scales.share_code();
  __syncthreads();

  const int64_t start = int64_t{blockIdx.x} * elements_per_block(kUnaligned) - args.shift;
  for (int step = 0; step < kSteps; ++step) {
    const int64_t i = start + (step * kDequantThreads + threadIdx.x) * kVector;
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

// Eight 16-byte vectors a lane, which is what a tall tile of fp32 is, spill registers.
template <class T>
constexpr bool has_tall = sizeof(T) == 2;

// The kernels of a family for one dtype, flat or nested, by DequantShape.
template <class Arch, class T, bool Nested>
void set_kernels(const void *(&kernels)[kDequantShapes]) {
  kernels[kUnaligned] = (const void *)dequant_unaligned<Arch, T, Nested>;
  kernels[kWide] = (const void *)dequant_aligned<Arch, T, Nested, kWide>;
  if constexpr (has_tall<T>) kernels[kTall] = (const void *)dequant_aligned<Arch, T, Nested, kTall>;
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
