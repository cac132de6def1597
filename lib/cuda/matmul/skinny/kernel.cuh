// y = x W^T for up to 16 rows of x and a weight with a codebook: a skinny GEMM with mma.sync.
//
// A CTA has rows of the weight, and each of its 16 warps 256 of their columns, so that a warp's
// part of x stays in registers for all rows. W is A, x is B. One look-up in a LUT of all 256 bytes
// turns a byte into two numbers (one PRMT for the address, one LDS). Scales are applied to the fp32
// sums of each block. Where a CTA has 64 or 99 KiB of shared memory, and for 16 rows of x without
// TMA, it has 8 warps and half of the LUT (NarrowMma); the figures below are those of 16 warps.
//
// Cost: 0.516 bytes read per weight; memory bounds it. Shared memory is next: a warp tile takes 64
// cycles for look-ups, 16 to write, 16 to read, 10 for scales and 5 for sums. 16 warps need 1780
// cycles where memory takes 1800 at 4.3 TB/s; measured: 2000. docs/design/matmul-skinny.md draws
// the data path and has the experiments.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/lora/ctas.cuh"
#include "cuda/matmul/skinny/args.hpp"
#include "cuda/matmul/skinny/e2m1_mainloop.cuh"
#include "cuda/matmul/skinny/epilogue.cuh"
#include "cuda/matmul/skinny/fp32_mainloop.cuh"
#include "cuda/matmul/skinny/mainloop.cuh"
#include "cuda/matmul/skinny/pipeline.cuh"
#include "cuda/matmul/skinny/scale_stage.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/weight/byte_lut.cuh"

namespace nf4::cuda {
namespace {

// Prefetches the first weights into L2, which is allowed while the predecessor still writes.
template <class Arch>
__device__ __forceinline__ void prefetch_rows(const SkinnyArgs &args, const CtaRows &rows) {
  if constexpr (Arch::kBulkPrefetch) {
    if (threadIdx.x != 0 || args.work.prefetch_bytes == 0) return;
    prefetch_l2<Arch>(args.matmul.weight.packed + rows.first * args.matmul.weight.cols / 2,
                      static_cast<uint32_t>(args.work.prefetch_bytes));
  }
}

// All threads of the CTA call it, and a barrier must follow. It returns the unit of the sums.
template <class T, class Scales, class Lut, int kThreads>
__device__ __forceinline__ float build_lut(const SkinnyArgs &args, float entry, uint8_t *shared) {
  if constexpr (std::is_same_v<T, float>) {
    return fill_split_lut<kThreads>(shared, entry);
  } else {
    float unit;
    const uint32_t entry = lane_entry<T>(args.codebook, args.matmul.weight.codebook, unit);
    const auto fill = [&](uint32_t entry, auto pack) {
      fill_lut<4, kThreads, Lut>(shared, static_cast<int>(threadIdx.x), entry, pack);
    };
    if constexpr (Scales::kLowNibbleFirst)
      fill(E2m1<T>::with_factor(entry), pack_low_first);
    else
      fill(entry, pack_entries);
    return unit;
  }
}

// An adapter's data in the shared memory of a weight CTA.
struct SharedLora {
  int *receivers;  // counts the warps that asked to receive it
  float *product;  // [m][stride + kLoraPadding]
  __device__ __forceinline__ SharedLora(const SkinnyArgs &args, uint8_t *shared)
      : receivers(reinterpret_cast<int *>(shared + args.smem_lora)),
        product(reinterpret_cast<float *>(receivers + 4)) {}
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) *receivers = 0;
  }
  // Returns true for one warp, the first.
  __device__ __forceinline__ bool is_receiver() const {
    int before = 0;
    if (threadIdx.x % 32 == 0) before = atomicAdd(receivers, 1);
    return __shfl_sync(0xffffffffu, before, 0) == 0;
  }
  template <class Arch, class T>
  __device__ __forceinline__ void receive(const LoraCtaArgs &args, int cta) const {
    if constexpr (sizeof(T) == 2)
      if (args.ctas > 0) return receive_lora<T>(args, cta, product);
    load_lora<Arch, T>(args, product);
  }
};

// Waits for everything that a weight CTA reads, except the adapter's product.
template <class Arch>
__device__ __forceinline__ void wait_for_inputs(const LoraCtaArgs &args) {
  if (args.ctas > 0)
    pdl_wait<Arch>();
  else
    pdl_wait_for_earlier<Arch>();
}

// The work of one of a weight's CTAs.
template <class Arch, class T, class Scales, class WarpMma, bool kLora>
__device__ __forceinline__ void run_cta(const SkinnyArgs &args, int cta) {
  constexpr int kWarps = kWarpsOf<WarpMma>, kThreads = 32 * kWarps;
  constexpr bool kLoadsAhead = WarpMma::kLoadsAhead;
  using Kind = CodebookSkinny<Arch, WarpMma>;
  using Lut = typename WarpMma::Lut;
  extern __shared__ __align__(1024) uint8_t shared[];
  const MatmulArgs &matmul = args.matmul;
  const CtaRows rows(args.work, cta);
  const int tiles = rows.tiles();
  prefetch_rows<Arch>(args, rows);
  if constexpr (kLora)
    wait_for_inputs<Arch>(args.lora);
  else
    pdl_wait<Arch>();

  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int n_warp = static_cast<int>(args.work.k_warps_divisor.divide(warp));
  const int first_k_tile = warp - n_warp * args.work.k_warps;
  const int first_tile = n_warp < args.work.n_warps ? n_warp : tiles;
  WeightPipeline<Kind> pipeline(
      args, shared, warp, rows.first,
      WarpTileIterator<kWarps>(args.work, tiles, first_tile, first_k_tile));
  ScaleStage<Arch, Scales, kThreads> scales(args, shared, Kind::kSmem.scale_barrier);
  const SharedLora lora(args, shared);
  pipeline.init();
  scales.init();
  if constexpr (kLora) lora.init();
  // The small loads come before the large ones, which delay them. All of them are ordinary loads:
  // the compiler may move an __ldg above the wait.
  float offset = 0;
  if constexpr (Scales::kNested) offset = *matmul.weight.nested_offset;
  float entry = 0;
  if constexpr (std::is_same_v<T, float>)
    entry = device_codebook(matmul.weight)[threadIdx.x % kCodebookSize];
  WarpMma warp_mma;
  warp_mma.load_x(matmul, first_k_tile);
  scales.load_scale_code();
  constexpr bool kKeep = WarpMma::kKeepsLane;
  const Lut lut(shared, keep_in_register<kKeep>(threadIdx.x % 32 * Lut::kLaneBytes));
  const int thread_in_group = static_cast<int>(keep_in_register<kKeep>(threadIdx.x % 4));
  float unit = 1;
  uint32_t phase = 0;
#pragma unroll 1
  for (int first = 0; first < tiles; first += args.work.group_tiles, phase ^= 1) {
    const PartialSums<WarpMma> group{first, min(first + args.work.group_tiles, tiles),
                                     reinterpret_cast<float *>(shared + Kind::kSmem.partials)};
    const int first_row = first * kWarpTileN;
    scales.load(rows.first + first_row,
                min(args.work.group_tiles * kWarpTileN, rows.count - first_row));
    if (first == 0) {
      pipeline.load_next();
      pdl_launch_dependents<Arch>();
      unit = build_lut<T, Scales, Lut, kThreads>(args, entry, shared);
    }
    scales.publish(first == 0);
#pragma unroll 1
    for (int stage = 1; stage < Kind::kSmem.stages && first == 0; ++stage) pipeline.load_next();
    // This is done now, while the first tile is in flight, and not when the last sums are complete.
    Epilogue<T, WarpMma> epilogue(args, rows, group, threadIdx.x);
    if constexpr (kLora) epilogue.prefetch_lora(matmul.lora, rows, group, threadIdx.x);
#pragma unroll 1
    for (int k_tile = first_k_tile; k_tile < args.work.k_tiles; k_tile += kWarps) {
      if (!kLoadsAhead && (k_tile != first_k_tile || first != 0)) warp_mma.load_x(matmul, k_tile);
      warp_mma.prepare_x();
      if (kLoadsAhead) {
        const int next = k_tile + kWarps;
        if (next < args.work.k_tiles || group.end < tiles)
          warp_mma.load_x(matmul, next < args.work.k_tiles ? next : first_k_tile);
      }
      auto cursor = scales.cursor(k_tile, first_tile, WarpMma::row(0), thread_in_group);
      float *partial = group.of_warp(first_tile, warp);
#pragma unroll 1
      for (int tile = first_tile; first + tile < group.end; tile += args.work.n_warps) {
        const auto find_scales = [&] {
          scales.wait(phase);
          const auto found = scales.get(cursor, thread_in_group, offset);
          scales.advance(cursor);
          return found;
        };
        warp_mma.add(pipeline.wait_next(), lut, find_scales, k_tile != first_k_tile, partial);
        __syncwarp();  // all lanes have read it before the stage is overwritten
        pipeline.load_next();
        partial += args.work.n_warps * kWarps * group.kTilePartials;
      }
    }
    // The first warp that has no tiles left does this, so that the others hide its latency.
    if constexpr (kLora)
      if (first == 0 && lora.is_receiver()) lora.receive<Arch, T>(args.lora, cta);
    __syncthreads();
    const uint32_t outputs = (group.end - group.first) * group.kTilePartials;
    for (uint32_t i = threadIdx.x; i < outputs;) {
      if constexpr (kLora) epilogue.add_lora(matmul.lora, lora.product, rows, group, i);
      epilogue.store(args.work.k_warps, unit);
      i += kThreads;
      if (i < outputs) epilogue = Epilogue<T, WarpMma>(args, rows, group, i);
    }
    if (group.end < tiles) __syncthreads();
  }
}

// cols is a multiple of kScaleK; the weight and rows of x are 16-byte aligned.
template <class Arch, class T, class Scales, class WarpMma, bool kLora>
__global__ void __launch_bounds__(32 * kWarpsOf<WarpMma>, 1)
    matmul_skinny(const __grid_constant__ SkinnyArgs args) {
  int cta = static_cast<int>(blockIdx.x);
  if constexpr (kLora && sizeof(T) == 2) {
    extern __shared__ __align__(1024) uint8_t shared[];
    if (cta < args.lora.ctas)
      return multiply_lora<Arch, T, kWarpsOf<WarpMma>>(args.lora, cta,
                                                       reinterpret_cast<float *>(shared));
    cta -= args.lora.ctas;
  }
  run_cta<Arch, T, Scales, WarpMma, kLora>(args, cta);
}

// The same for several weights. A whole CTA has one of them, so its arguments are found through
// uniform registers and a thread needs no more registers.
template <class Arch, class T, class Scales, class WarpMma>
__global__ void __launch_bounds__(32 * kWarpsOf<WarpMma>, 1)
    matmul_skinny_batch(const __grid_constant__ SkinnyBatch batch) {
  const int cta = static_cast<int>(blockIdx.x);
  int problem = 0;
#pragma unroll
  for (int i = 1; i < kSkinnyBatchMax; ++i) problem += cta >= batch.first_cta[i];
  run_cta<Arch, T, Scales, WarpMma, false>(batch.problems[problem], cta - batch.first_cta[problem]);
}

}  // namespace
}  // namespace nf4::cuda
