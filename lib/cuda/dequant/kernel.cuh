// Dequantize: both quantizations undone in one pass, no intermediate buffer.
//
// Cost, nested, 16-bit output, blocksize 64: 0.516 bytes read and 2 written per weight.
// About 5 instructions per weight (shift, shuffle, multiply, half a conversion, and its
// share of the rest), so memory bounds it.
//
// One thread block per 4096 elements and no loop: a persistent or grid-stride grid lets
// multiprocessors drift apart, which widens the window of addresses in flight and costs
// 8-10% at large sizes on an H200. A warp owns 512 elements, so that two (16-bit) or four
// (32-bit) loads a lane are in flight, each warp-wide access is contiguous, and the
// scales of the tile, at most 16, are computed one per lane and shared by shuffles.
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

// The scales of a weight, as a thread block reads them. The 8-bit code is copied to
// shared memory, where a lookup by 32 lanes is cheap.
template <bool Nested>
struct Scales {
  const DequantArgs &args;
  const float *code;  // shared, 256
  float offset;

  __device__ __forceinline__ Scales(const DequantArgs &arguments, float *shared_code)
      : args(arguments), code(shared_code), offset(0) {
    if constexpr (Nested) {
      static_assert(kDequantThreads == kScaleCodeSize);
      shared_code[threadIdx.x] = __ldg(args.nested_code + threadIdx.x);
      offset = __ldg(args.nested_offset);
      __syncthreads();
    }
  }

  __device__ __forceinline__ float operator()(int64_t block) const {
    if constexpr (Nested) {
      const uint8_t q = __ldg(static_cast<const uint8_t *>(args.absmax) + block);
      const float nested = __ldg(args.nested_absmax + (block >> args.nested_blocksize_log2));
      return nested_scale(code[q], nested, offset);
    } else {
      return __ldg(static_cast<const float *>(args.absmax) + block);
    }
  }
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
template <class Arch, bool Nested>
__device__ __forceinline__ void prefetch(const DequantArgs &args) {
  if constexpr (Arch::kBulkPrefetch) {
    const int64_t block = static_cast<int64_t>(blockIdx.x) + args.prefetch_blocks;
    // The last thread block may be partial, so its data is left alone.
    if (args.prefetch_blocks == 0 || threadIdx.x != 0 || block + 1 >= gridDim.x) return;
    constexpr int kBytes = kDequantElementsPerBlock / 2;
    prefetch_l2<Arch>(args.packed + block * kBytes, kBytes);
    const int scale_bytes = (kDequantElementsPerBlock >> args.blocksize_log2) * (Nested ? 1 : 4);
    if (scale_bytes % 16 == 0)
      prefetch_l2<Arch>(static_cast<const uint8_t *>(args.absmax) + block * scale_bytes,
                        scale_bytes);
  }
}

// For out on a 16-byte boundary and packed on that of PackedVector.
template <class Arch, class T, bool Nested>
__global__ void
__launch_bounds__(kDequantThreads, kThreadsPerMultiprocessor / kDequantThreads)
dequant_aligned(const __grid_constant__ DequantArgs args) {
  constexpr int kVector = kPerVector<T>;
  constexpr int kSteps = kDequantTile / 32 / kVector;
  using Packed = typename PackedVector<T>::type;
  __shared__ float code[Nested ? kScaleCodeSize : 1];

  const int lane = threadIdx.x % 32;
  const int64_t tile =
      static_cast<int64_t>(blockIdx.x) * (kDequantThreads / 32) + threadIdx.x / 32;
  const int64_t first = tile * kDequantTile + lane * kVector;
  const CachePolicy once = evict_first<Arch>();

  // The weights' loads first: everything else happens while they fly.
  uint32_t words[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t i = first + step * 32 * kVector;
    words[step] = 0;
    if (i + kVector <= args.elements)
      words[step] = load_streamed<Arch>(reinterpret_cast<const Packed *>(args.packed + i / 2), once);
  }
  prefetch<Arch, Nested>(args);
  const ShuffledCodebook codebook(args);
  const Scales<Nested> scales(args, code);

  const int tile_blocks = max(kDequantTile >> args.blocksize_log2, 1);
  const int64_t block =
      ((tile * kDequantTile) >> args.blocksize_log2) + (lane & (tile_blocks - 1));
  const float lane_scale = block < args.blocks ? scales(block) : 0.0f;

  const CachePolicy output = args.keep_output ? evict_normal<Arch>() : once;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int in_tile = step * 32 * kVector + lane * kVector;
    const float scale = __shfl_sync(kAllLanes, lane_scale, in_tile >> args.blocksize_log2);
    float values[kVector];
    decode(words[step], scale, codebook, values);
    const int64_t i = tile * kDequantTile + in_tile;
    if (i + kVector <= args.elements)
      store_streamed<Arch>(reinterpret_cast<uint4 *>(static_cast<T *>(args.out) + i),
                           pack_vector<T>(values), output);
    else
      dequant_elements<T>(args, scales, i, args.elements);
  }
}

// For any alignment: vectors start at the 16-byte boundaries of out, wherever that is in
// the weight, so a vector may start at an odd element and straddle two blocks.
template <class Arch, class T, bool Nested>
__global__ void
__launch_bounds__(kDequantThreads, kThreadsPerMultiprocessor / kDequantThreads)
dequant_unaligned(const __grid_constant__ DequantArgs args) {
  constexpr int kVector = kPerVector<T>;
  constexpr int kSteps = kDequantTile / 32 / kVector;
  __shared__ float code[Nested ? kScaleCodeSize : 1];
  __shared__ float codebook[kCodebookSize];
  if (threadIdx.x < kCodebookSize)
    codebook[threadIdx.x] =
        __ldg(device_codebook(args.codebook, args.format) + threadIdx.x);
  __syncthreads();
  const Scales<Nested> scales(args, code);

  const int64_t start =
      static_cast<int64_t>(blockIdx.x) * kDequantElementsPerBlock - args.shift;
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
      values[k] = multiply_rn(codebook[unpack_code(args.packed, i + k)],
                              in_last ? last_scale : scale);
    }
    store_streamed<Arch>(reinterpret_cast<uint4 *>(static_cast<T *>(args.out) + i),
                         pack_vector<T>(values), evict_first<Arch>());
  }
}

template <class Arch>
DequantFamily dequant_family(Family family) {
#define NF4_ROW(T)                                                         \
  {{(const void *)dequant_unaligned<Arch, T, false>,                       \
    (const void *)dequant_aligned<Arch, T, false>},                        \
   {(const void *)dequant_unaligned<Arch, T, true>,                        \
    (const void *)dequant_aligned<Arch, T, true>}}
  return {family, {NF4_ROW(float), NF4_ROW(__half), NF4_ROW(__nv_bfloat16)}};
#undef NF4_ROW
}

}  // namespace
}  // namespace nf4::cuda
