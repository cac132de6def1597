#include "cuda/matmul/wide.cuh"
#include "cuda/matmul/wide.hpp"

namespace nf4::cuda {
namespace {

template <class Tile>
WideShape wide_shape(double slab_cycles) {
  using Half = std::conditional_t<Tile::kScaledSums, CodebookEntries<__half>, ExactWeights>;
  using BFloat16 =
      std::conditional_t<Tile::kScaledSums, CodebookEntries<__nv_bfloat16>, NearWeights>;
  return {Tile::kColumns,
          Tile::kRows,
          128 * (Tile::kWarpgroups + 1),
          WideLayout<Tile>::kBytes,
          slab_cycles,
          Tile::kBoxes,
          Tile::kStreamed,
          Tile::kScaledSums,
          {(const void *)matmul_wide<Half, Tile>, (const void *)matmul_wide<BFloat16, Tile>}};
}

}  // namespace

// Cycles of a slab on an H200, from times at 1.755 GHz (wide.cuh); 176 and 208 are between.
const WideShape kWideShapes[] = {
    wide_shape<WideTile<16, 4>>(1200),        wide_shape<WideTile<32, 4>>(1440),
    wide_shape<WideTile<64, 4>>(2040),        wide_shape<WideTile<64, 2>>(1065),
    wide_shape<WideTile<128, 2>>(1590),       wide_shape<WideTile<152, 2>>(1780),
    wide_shape<WideTile<176, 2>>(1930),       wide_shape<WideTile<208, 2>>(2090),
    wide_shape<WideTile<256, 2>>(2290),       wide_shape<WideTile<272, 2>>(2430),
    wide_shape<WideTile<304, 2>>(2650),       wide_shape<WideTile<128, 2, true>>(1620),
    wide_shape<WideTile<152, 2, true>>(1810), wide_shape<WideTile<176, 2, true>>(1960),
    wide_shape<WideTile<208, 2, true>>(2130), wide_shape<WideTile<256, 2, true>>(2330),
    wide_shape<WideTile<272, 2, true>>(2460), wide_shape<WideTile<304, 2, true>>(2690),
};

}  // namespace nf4::cuda
