// The measured limits between dequantize's configurations, one struct per GPU. Every GPU uses the
// H200's until another is measured; docs/design/dequant.md has the figures.
#pragma once

#include <cstdint>

namespace nf4::cuda {

struct DequantTuning {
  // Limits for 16-bit and for 32-bit outputs.
  struct Limits {
    int64_t warp_tile_1024_above;  // in elements: kWarpTile1024 is faster in this range
    int64_t warp_tile_1024_up_to;
    int64_t keep_output_up_to;  // in bytes: a reader gains more from L2 than normal stores cost
  };
  Limits bits16;
  Limits bits32;

  constexpr const Limits &limits(int element_bytes) const {
    return element_bytes == 4 ? bits32 : bits16;
  }
};

constexpr int64_t kMi = int64_t{1} << 20;
inline constexpr DequantTuning kH200Dequant = {{5 * kMi, 32 * kMi, 96 * kMi},
                                               {3 * kMi, 16 * kMi, 48 * kMi}};

}  // namespace nf4::cuda
