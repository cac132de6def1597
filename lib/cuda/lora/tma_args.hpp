// What the kernels of an adapter's product by TMA get. No device code.
#pragma once

#include "cuda/lora/args.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace nf4::cuda {

struct LoraTmaArgs {
  LoraProductArgs product;  // rank_chunks and cluster_log2: of lora_product_wide
  TensorMap x_map;          // boxes of a step of a tile's rows
  TensorMap in_map;         // of a step of a tile's ranks (factor_box.cuh)
  int tiles;                // of x, of lora_product_persistent
};

// Bytes of a box's rows where those are ranks: what a swizzle takes at most.
constexpr int lora_rank_box_bytes(int ranks, int element_bytes) {
  return ranks * element_bytes < 128 ? ranks * element_bytes : 128;
}

constexpr int kPersistentWarps = kLoraProductThreads / 32;
constexpr int kPersistentRanks = 16;
constexpr int kLoraStep = 64;  // columns of a warp at a time
constexpr int kPersistentTileM[] = {32, 64};

// Shared memory: for each warp a pipeline of steps; then the sums of each warp, and mbarriers.
struct LoraSmem {
  int stages;  // of a warp
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

// lora_product_wide: a CTA has tiles of so many rows of x and, by kernel, ranks.
constexpr int kWideTileM = 64;
constexpr int kWideRanks[] = {32, 64};
constexpr int kWideThreads = kLoraProductThreads + 32;  // a warp copies

// Shared memory: a pipeline of steps; then the sums that a CTA gets from its cluster, and
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
  constexpr int kPipelineBytes = 96 << 10;  // two CTAs a multiprocessor
  const int x_bytes = kWideTileM * kLoraStep * 2;
  const int stage_bytes = x_bytes + ranks * kLoraStep * (in_is_fp32 ? 4 : 2);
  const int stages = kPipelineBytes / stage_bytes, received = stages * stage_bytes;
  const int barriers = received + kWideTileM * ranks * 4;
  return {stages, x_bytes, stage_bytes, received, barriers, barriers + stages * 2 * 8};
}

}  // namespace nf4::cuda
