// The kernel configurations of dequantize.
#pragma once

#include "core/macros.hpp"

namespace nf4::cuda {

// kUnaligned is for any alignment; the others, for aligned operands, are named by the elements
// that a warp takes.
enum DequantConfig { kUnaligned, kWarpTile512, kWarpTile1024 };
constexpr int kDequantConfigCount = 3;

struct DequantTiling {
  int threads;    // of a CTA
  int warp_tile;  // elements of a warp
  int resident;   // threads that a multiprocessor should hold, which limits their registers

  NF4_HOST_DEVICE constexpr int cta_tile() const { return threads / 32 * warp_tile; }
};

// Tiles of 512 have most CTAs in flight; those of 1024 start half as many for as many elements.
NF4_HOST_DEVICE constexpr DequantTiling dequant_tiling(DequantConfig config) {
  if (config == kUnaligned) return {256, 512, 1024};
  if (config == kWarpTile512) return {256, 512, 2048};
  return {128, 1024, 2048};
}

}  // namespace nf4::cuda
