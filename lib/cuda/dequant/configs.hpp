// The kernel configurations of dequantize.
#pragma once

#include "core/macros.hpp"

namespace nf4::cuda {

// kUnaligned works with any alignment. The others, for aligned operands, are named after the number
// of elements that a warp processes.
enum DequantConfig { kUnaligned, kWarpTile512, kWarpTile1024 };
constexpr int kDequantConfigCount = 3;

struct DequantTiling {
  int threads;    // per CTA
  int warp_tile;  // elements of a warp
  int resident;   // threads that a multiprocessor should hold, which limits their registers

  NF4_HOST_DEVICE constexpr int cta_tile() const { return threads / 32 * warp_tile; }
};

// Tiles of 512 have most CTAs in flight; tiles of 1024 start half as many CTAs for the same
// elements.
NF4_HOST_DEVICE constexpr DequantTiling dequant_tiling(DequantConfig config) {
  if (config == kUnaligned) return {256, 512, 1024};
  if (config == kWarpTile512) return {256, 512, 2048};
  return {128, 1024, 2048};
}

}  // namespace nf4::cuda
