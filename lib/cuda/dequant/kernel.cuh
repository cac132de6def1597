// Dequantize: both quantizations undone in one pass, no intermediate buffer.
//
// Cost, nested, 16-bit output, blocksize 64: 0.516 bytes read and 2 written per weight.
// About 5 instructions per weight (shift, shuffle, multiply, half a conversion, and its
// share of the rest), so memory bounds it.
//
// One thread block for each 8 tiles and no loop: a persistent or
// grid-stride grid lets multiprocessors drift apart, which widens the window of addresses in
// flight and costs 8-10% at large sizes on an H200. A warp owns a tile of 512 or 1024
// elements, so that two or four loads a lane are in flight, each warp-wide access is
// contiguous, and the scales of the tile, at most 32, are computed one per lane and shared
// by shuffles.
//
// Log, bf16 nested on an H200, microseconds at 4096x1024 / 4096x4096 / 14336x4096; the
// fastest stream of the same bytes 3.9-4.3 / 11.6-12.0 / 37.3:
//   5.01 / 14.0 / 41.6   scales loaded after the barrier that publishes the 8-bit code
//   4.75 / 12.4 / 37.9   all loads before it; what a thread block has in common in uniform
//                        registers (predicted: one memory latency less, 0.5 us)
//   4.46 / 12.0 / 37.5   tiles of 1024 with 4 MB of prefetch; at 11008x4096 and above 0.5-2%
//                        slower than tiles of 512, hence both
//   5.01 / 12.4 / 37.4   blocksizes 64 and 256 as constants: lost (predicted 10% fewer
//                        instructions to matter at the small size)
//   4.59 / 12.3 / 37.5   no cache policies: no difference
//   3.9-4.2/11.5 / 36.9  programmatic dependent launch (predicted 0.5 us of all sizes)
//   4096x1024 alone: times and the order of layouts change by 10% with where buffers lie, the
//                        stream's too: 64 to 512 threads, tiles of 512 to 2048, 64 registers
//                        for 32 were each the best of some run and 8% behind in another
//   fp32, 4096x1024: 6.58 to 6.36 with 4-byte loads spread by a shuffle, in place of twice as
//                        many of 2 bytes; 14336x4096 66.9 to 66.6
//   unaligned, 14336x4096 bf16: 91 us byte by byte, with two scales looked up a vector; 64
//                        with scales by shuffles (predicted 45); 44 with codes loaded as
//                        whole words, shifted into place in pairs
#pragma once

#include <cuda_runtime.h>

#include "core/decode.hpp"
#include "cuda/dequant/args.hpp"
#include "cuda/element.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/weight/codebooks.cuh"

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
      return {__ldg(args.weight.nested_absmax + (block >> args.weight.nested_blocksize_log2)),
              __ldg(static_cast<const uint8_t *>(args.weight.absmax) + block)};
    else
      return {__ldg(static_cast<const float *>(args.weight.absmax) + block), 0};
  }

  // A barrier: all threads of the block, which are `Threads`, call it.
  template <int Threads>
  __device__ __forceinline__ void share_code() {
    if constexpr (Nested) {
      offset = __ldg(args.weight.nested_offset);
#pragma unroll
      for (int i = 0; i < kScaleCodeSize; i += Threads)
        if (Threads <= kScaleCodeSize || threadIdx.x < kScaleCodeSize)
          code[i + threadIdx.x] = __ldg(args.weight.nested_code + i + threadIdx.x);
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
      : entry(__ldg(device_codebook(args.weight) + threadIdx.x % kCodebookSize)) {}
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
  const float *codebook = device_codebook(args.weight);
  for (int64_t i = first; i < last; ++i) {
    const float value = __ldg(codebook + unpack_code(args.weight.packed, i));
    static_cast<T *>(args.out)[i] =
        from_float<T>(multiply_rn(value, scales(i >> args.weight.blocksize_log2)));
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
      codes[step] = load_once<Arch>(words + step * 32 + lane, policy);
  } else {
    // A word is two vectors of fp32. Loads of 4 bytes are faster than twice as many of 2.
    uint32_t loaded[Steps / 2];
#pragma unroll
    for (int i = 0; i < Steps / 2; ++i) loaded[i] = load_once<Arch>(words + i * 32 + lane, policy);
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
    return load_once<Arch>(reinterpret_cast<const uint32_t *>(packed), policy);
  else
    return load_once<Arch>(reinterpret_cast<const uint16_t *>(packed), policy);
}

// Thread 0 asks L2 for the weights and scales of a thread block that starts later.
template <class Arch, bool Nested, int kElements>
__device__ __forceinline__ void prefetch(const DequantArgs &args) {
  if constexpr (Arch::kBulkPrefetch) {
    constexpr int64_t kBlocksAhead = kPrefetchElements / kElements;
    const int64_t ahead = int64_t{blockIdx.x} + kBlocksAhead;
    // The last thread block may be partial, so its data is left alone.
    if (!args.prefetch || threadIdx.x != 0 || ahead + 1 >= gridDim.x) return;
    prefetch_l2<Arch>(args.weight.packed + ahead * (kElements / 2), kElements / 2);
    const int scale_bytes = (kElements >> args.weight.blocksize_log2) * (Nested ? 1 : 4);
    if (scale_bytes % 16 == 0)
      prefetch_l2<Arch>(static_cast<const uint8_t *>(args.weight.absmax) + ahead * scale_bytes,
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
    load_codes<Arch, T>(args.weight.packed + start / 2 + tile / 2, once, words);
  } else {
    const uint8_t *in = args.weight.packed + start / 2 + first / 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      words[step] =
          has_vector(step) ? load_vector_codes<Arch, T>(in + step * kStride / 2, once) : 0;
  }
  const int tile_blocks = max(Tile >> args.weight.blocksize_log2, 1);
  const int64_t block = (start >> args.weight.blocksize_log2) +
                        ((tile >> args.weight.blocksize_log2) + (lane & (tile_blocks - 1)));
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
    const float scale = __shfl_sync(kAllLanes, lane_scale, in_tile >> args.weight.blocksize_log2);
    float values[kVector];
    decode(words[step], scale, codebook, values);
    if (has_vector(step))
      store_once<Arch>(out + step * 32, pack_vector<T>(values), output);
    else
      dequant_elements<T>(args, scales, start + tile + in_tile, args.elements);
  }
}

// For out on 16 bytes and packed on 4.
template <class Arch, class T, bool Nested, int Threads, int Tile, int Resident>
__global__ void __launch_bounds__(Threads, resident_ctas(Resident, Threads))
    dequant_aligned(const __grid_constant__ DequantArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  __shared__ float code[Nested ? kScaleCodeSize : 1];
  Scales<Nested> scales(args, code);
  if ((blockIdx.x + int64_t{1}) * (Threads / 32 * Tile) <= args.elements)
    dequant_block<Arch, T, Nested, Threads, Tile, true>(args, scales);
  else
    dequant_block<Arch, T, Nested, Threads, Tile, false>(args, scales);
}

constexpr DequantLayout kUnalignedLayout = dequant_layout(kUnaligned);

// Eight codes in a row from any nibble on, the first in the highest four bits, from the word
// that it is in and the next.
__device__ __forceinline__ uint32_t codes_from(const uint32_t *words, int nibble) {
  const uint32_t high = __byte_perm(__ldg(words + nibble / 8), 0, 0x0123);
  const uint32_t low = __byte_perm(__ldg(words + nibble / 8 + 1), 0, 0x0123);
  return __funnelshift_l(low, high, nibble % 8 * 4);
}

// The elements of one thread block from `start` on. Nibbles count from the 4-byte boundary
// before packed. `Full`: the tensor goes on before and after them, so nothing is checked.
template <class Arch, class T, bool Nested, bool Full>
__device__ __forceinline__ void dequant_unaligned_block(const DequantArgs &args, int64_t start,
                                                        Scales<Nested> &scales) {
  constexpr int kVector = kPerVector<T>;
  constexpr int kStride = 32 * kVector;
  constexpr int kSteps = kUnalignedLayout.tile / kStride;
  const int lane = threadIdx.x % 32;
  const int tile = threadIdx.x / 32 * kUnalignedLayout.tile;
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(args.weight.packed) % 4);
  const int64_t start_nibble = 2 * misaligned + start;
  const uint32_t *words =
      reinterpret_cast<const uint32_t *>(args.weight.packed - misaligned) + (start_nibble >> 3);
  // Only bytes of packed are read, so both words must lie in it.
  const auto is_whole = [&](int64_t i) {
    const int64_t first_word = (2 * misaligned + i) & ~int64_t{7};
    return i >= 0 && i + kVector <= args.elements && first_word >= 2 * misaligned &&
           first_word + 16 <= 2 * misaligned + (args.elements + 1) / 2 * 2;
  };

  uint32_t codes[kSteps];
  bool whole[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int in_block = tile + step * kStride + lane * kVector;
    whole[step] = Full || is_whole(start + in_block);
    codes[step] =
        whole[step] ? codes_from(words, static_cast<int>(start_nibble & 7) + in_block) : 0;
  }
  // A tile is in at most 17 quantization blocks: one lane each.
  const int mask = (1 << args.weight.blocksize_log2) - 1;
  const int start_in_block = static_cast<int>(start) & mask;
  const int tile_block = (start_in_block + tile) >> args.weight.blocksize_log2;
  const int64_t block = (start >> args.weight.blocksize_log2) + tile_block + lane;
  const auto fetched = scales.fetch(max(min(block, args.blocks - 1), int64_t{0}));
  const ShuffledCodebook codebook(args);
  scales.template share_code<kUnalignedLayout.threads>();
  const float lane_scale = scales.scale(fetched);

  const CachePolicy output = args.keep_output ? evict_normal<Arch>() : evict_first<Arch>();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int in_block = tile + step * kStride + lane * kVector;
    const int element = start_in_block + in_block;
    const int in_tile = (element >> args.weight.blocksize_log2) - tile_block;
    const float scale = __shfl_sync(kAllLanes, lane_scale, in_tile);
    const float next_scale = __shfl_sync(kAllLanes, lane_scale, in_tile + 1);
    const int left = mask + 1 - (element & mask);  // elements of the first scale
    float values[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k)
      values[k] = multiply_rn(codebook[codes[step] >> (28 - 4 * k)], k < left ? scale : next_scale);
    const int64_t i = start + in_block;
    if (whole[step])
      store_once<Arch>(reinterpret_cast<uint4 *>(static_cast<T *>(args.out) + i),
                       pack_vector<T>(values), output);
    else
      dequant_elements<T>(args, scales, max(i, int64_t{0}), min(i + kVector, args.elements));
  }
}

// For any alignment: vectors start at the 16-byte boundaries of out, wherever that is in
// the weight, so a vector may start at an odd element and straddle two blocks.
template <class Arch, class T, bool Nested>
__global__ void __launch_bounds__(kUnalignedLayout.threads, resident_ctas(kUnalignedLayout.resident,
                                                                          kUnalignedLayout.threads))
    dequant_unaligned(const __grid_constant__ DequantArgs args) {
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  __shared__ float code[Nested ? kScaleCodeSize : 1];
  Scales<Nested> scales(args, code);
  const int64_t start = int64_t{blockIdx.x} * kUnalignedLayout.elements() - args.shift;
  if (start >= 8 && start + kUnalignedLayout.elements() + 16 <= args.elements)
    dequant_unaligned_block<Arch, T, Nested, true>(args, start, scales);
  else
    dequant_unaligned_block<Arch, T, Nested, false>(args, start, scales);
}

template <class Arch, class T, bool Nested, DequantShape Shape>
const void *aligned_kernel() {
  constexpr DequantLayout kLayout = dequant_layout(Shape);
  return (const void *)
      dequant_aligned<Arch, T, Nested, kLayout.threads, kLayout.tile, kLayout.resident>;
}

// The kernels of a family for one dtype, flat or nested, by DequantShape.
template <class Arch, class T, bool Nested>
void set_kernels(const void *(&kernels)[kDequantShapes]) {
  kernels[kUnaligned] = (const void *)dequant_unaligned<Arch, T, Nested>;
  kernels[kWide] = aligned_kernel<Arch, T, Nested, kWide>();
  kernels[kTall] = aligned_kernel<Arch, T, Nested, kTall>();
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
