// The arguments of the TMA kernels of an adapter's product. No device code.
#pragma once

#include "cuda/lora/args.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace nf4::cuda {

struct LoraTmaArgs {
  LoraProductArgs product;  // rank_chunks and cluster_log2 are for lora_product_wide
  TensorMap x_map;          // boxes of a step of a tile's rows
  TensorMap in_map;         // boxes of a step of a tile's ranks (factor_box.cuh)
  int tiles;                // tiles of x; for lora_product_persistent
};

// The bytes of a row of a box whose rows are ranks: at most a row of the swizzle.
constexpr int lora_rank_box_bytes(int ranks, int element_bytes) {
  return ranks * element_bytes < 128 ? ranks * element_bytes : 128;
}

constexpr int kPersistentWarps = kLoraProductThreads / 32;
constexpr int kPersistentRanks = 16;
constexpr int kLoraStep = 64;  // columns that a warp processes at a time
constexpr int kPersistentTileM[] = {32, 64};

// Shared memory: a pipeline of steps for each warp; then the sums of each warp, and mbarriers.
struct LoraSmem {
  int stages;  // per warp
  int x_bytes;
  int stage_bytes;
  int sums;  // offsets
  int barriers;
  int bytes;
};

constexpr LoraSmem lora_smem(int tile_m, bool in_is_fp32) {
  const int stages = tile_m == 32 ? 3 : 2, x_bytes = tile_m * kLoraStep * 2;
  const int stage_bytes = x_bytes + kPersistentRanks * kLoraStep * (in_is_fp32 ? 4 : 2);
  const int sums = kPersistentWarps * stages * stage_bytes;
  const int barriers = sums + kPersistentWarps * tile_m * kPersistentRanks * 4;
  return {stages, x_bytes, stage_bytes, sums, barriers, barriers + kPersistentWarps * stages * 8};
}

// lora_product_wide: a CTA has tiles of this many rows of x; the ranks depend on the kernel.
constexpr int kWideTileM = 64;
constexpr int kWideRanks[] = {32, 64};
constexpr int kWideThreads = kLoraProductThreads + 32;  // the additional warp copies

// Shared memory: a pipeline of steps; then the sums that a CTA receives from its cluster, and
// mbarriers.
struct WideLoraSmem {
  int stages;
  int x_bytes;
  int stage_bytes;
  int received;  // offsets
  int barriers;
  int bytes;
};

constexpr WideLoraSmem wide_lora_smem(int ranks, bool in_is_fp32) {
  constexpr int kPipelineBytes = 96 << 10;  // two CTAs per multiprocessor
  const int x_bytes = kWideTileM * kLoraStep * 2;
  const int stage_bytes = x_bytes + ranks * kLoraStep * (in_is_fp32 ? 4 : 2);
  const int stages = kPipelineBytes / stage_bytes, received = stages * stage_bytes;
  const int barriers = received + kWideTileM * ranks * 4;
  return {stages, x_bytes, stage_bytes, received, barriers, barriers + stages * 2 * 8};
}

}  // namespace nf4::cuda
