// p = x A^T on a few multiprocessors while the base product uses the others. CTAs are persistent;
// each of their warps has a pipeline of TMA copies that continues from one tile of x to the next. A
// warp has every 8th step of 64 columns, and all ranks, up to 16.
#pragma once

#include <cuda_runtime.h>

#include "cuda/lora/factor_box.cuh"
#include "cuda/lora/product.cuh"
#include "cuda/lora/tma_args.hpp"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace nf4::cuda {
namespace {

// The steps of a warp, one tile after another.
class LoraSteps {
 public:
  __device__ __forceinline__ explicit LoraSteps(const LoraTmaArgs &args)
      : args_(args),
        tile_(first_column() < args.product.cols ? static_cast<int>(blockIdx.x) : args.tiles) {}
  __device__ __forceinline__ bool is_valid() const { return tile_ < args_.tiles; }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ int column() const { return column_; }
  __device__ __forceinline__ void advance() {
    column_ += kStride;
    if (column_ < args_.product.cols) return;
    column_ = first_column();
    tile_ += args_.product.product_ctas;
  }

  static constexpr int kStride = kPersistentWarps * kLoraStep;
  static __device__ __forceinline__ int first_column() {
    return static_cast<int>(threadIdx.x) / 32 * kLoraStep;
  }

 private:
  const LoraTmaArgs &args_;
  int tile_;
  int column_ = first_column();
};

// The copies of a warp.
template <class Box, int kTileM, bool kInIsFp32>
class LoraPipeline {
 public:
  static constexpr LoraSmem kSmem = lora_smem(kTileM, kInIsFp32);

  __device__ __forceinline__ LoraPipeline(const LoraTmaArgs &args, uint8_t *shared)
      : args_(args), steps_(args) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    stages_ = shared + warp * kSmem.stages * kSmem.stage_bytes;
    barriers_ = reinterpret_cast<uint64_t *>(shared + kSmem.barriers) + warp * kSmem.stages;
  }
  // Initialises those of the whole CTA; all of its threads call it. Synccheck counts mbarrier.init
  // instructions.
  static __device__ __forceinline__ void init(uint8_t *shared) {
    if (threadIdx.x == 0) {
      auto *const barriers = reinterpret_cast<uint64_t *>(shared + kSmem.barriers);
#pragma unroll
      for (int i = 0; i < kPersistentWarps * kSmem.stages; ++i) mbarrier_init(barriers + i);
      fence_mbarrier_init();
    }
    __syncthreads();
  }
  // Issues the copies of the next step, if there is one, into the stage that was read first. All
  // lanes call it, after they have read that stage.
  __device__ __forceinline__ void load_next() {
    if (!steps_.is_valid()) return;
    if (threadIdx.x % 32 == 0) {
      uint64_t *const barrier = barriers_ + load_stage_;
      uint8_t *const stage = stages_ + load_stage_ * kSmem.stage_bytes;
      mbarrier_arrive_expect_tx(barrier, kSmem.stage_bytes);
      tma_load_2d(stage, &args_.x_map, steps_.column() * 2, steps_.tile() * kTileM, barrier);
      Box::load(stage + kSmem.x_bytes, &args_.in_map, steps_.column(), 0, barrier);
    }
    load_stage_ = load_stage_ == kSmem.stages - 1 ? 0 : load_stage_ + 1;
    steps_.advance();
  }
  // Waits for the next step.
  __device__ __forceinline__ const uint8_t *wait_next() {
    mbarrier_wait_parity(barriers_ + read_stage_, phase_);
    const uint8_t *const stage = stages_ + read_stage_ * kSmem.stage_bytes;
    read_stage_ = read_stage_ == kSmem.stages - 1 ? 0 : read_stage_ + 1;
    if (read_stage_ == 0) phase_ ^= 1;
    return stage;
  }

 private:
  const LoraTmaArgs &args_;
  LoraSteps steps_;
  uint8_t *stages_;
  uint64_t *barriers_;
  int load_stage_ = 0, read_stage_ = 0;
  uint32_t phase_ = 0;
};

template <class T, class Box, class Tile>
__device__ __forceinline__ void multiply_step(const uint8_t *stage, int x_bytes, Tile &tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kLoraStep / 16; ++k) {
    uint32_t b[4];
    Box::fragment(stage + x_bytes, 0, k, b);
#pragma unroll
    for (int i = 0; i < Tile::kM / 16; ++i) {
      uint32_t a[4];
      ldmatrix_x4(a, stage + swizzled_chunk(i * 16 + lane % 16, k * 2 + lane / 16));
      mma_m16n8k16(T{}, tile.sums[i][0], a, b[0], b[1]);
      mma_m16n8k16(T{}, tile.sums[i][1], a, b[2], b[3]);
    }
  }
}

// x and `in` must be in a form that tensor maps take.
template <class Arch, class T, class F, bool kGradient, int kTileM>
__global__ void __launch_bounds__(kLoraProductThreads, 1)
    lora_product_persistent(const __grid_constant__ LoraTmaArgs args) {
  using Tile = LoraTile<kTileM / 16, kPersistentRanks / 8>;
  using Box = LoraFactorBox<T, F, kGradient, kPersistentRanks>;
  using Pipeline = LoraPipeline<Box, kTileM, sizeof(F) == 4>;
  static_assert(kStoredWarps<Tile> == kLoraWarps);
  extern __shared__ __align__(1024) uint8_t shared[];
  const LoraProductArgs &product = args.product;
  const int copy_cta = static_cast<int>(blockIdx.x) - product.product_ctas;
  if (copy_cta >= 0) {
    pdl_wait<Arch>();
    pdl_launch_dependents<Arch>();
    return copy_out<T, F>(product, copy_cta);
  }
  auto *const partials = reinterpret_cast<float *>(shared + Pipeline::kSmem.sums);
  Pipeline::init(shared);
  Pipeline pipeline(args, shared);
  pdl_wait<Arch>();
  // This must not come earlier: the dependent waits for this kernel only before it reads this
  // kernel's output.
  pdl_launch_dependents<Arch>();
  for (int i = 0; i < Pipeline::kSmem.stages; ++i) pipeline.load_next();

  for (int tile_index = static_cast<int>(blockIdx.x); tile_index < args.tiles;
       tile_index += product.product_ctas) {
    Tile tile;
    for (int column = LoraSteps::first_column(); column < product.cols;
         column += LoraSteps::kStride) {
      multiply_step<T, Box>(pipeline.wait_next(), Pipeline::kSmem.x_bytes, tile);
      __syncwarp();
      pipeline.load_next();
    }
    store_partials(tile, partials);
    for (int output = threadIdx.x; output < Tile::kOutputs; output += kLoraProductThreads) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kLoraWarps; ++i) sum += partials[i * Tile::kOutputs + output];
      store_product<T>(product, int64_t{tile_index} * kTileM + Tile::row(output),
                       Tile::template rank<Box>(output), sum);
    }
    __syncthreads();  // the sums have been read
  }
}

}  // namespace
}  // namespace nf4::cuda
