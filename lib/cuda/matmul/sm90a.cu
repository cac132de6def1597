#include "cuda/matmul/wide.cuh"
#include "cuda/matmul/wide.hpp"

namespace nf4::cuda {
namespace {

template <class Tile>
WideShape wide_shape(double slab_cycles) {
  return {Tile::kColumns,
          Tile::kRows,
          128 * (Tile::kWarpgroups + 1),
          WideLayout<Tile>::kBytes,
          slab_cycles,
          Tile::kHalves,
          {(const void *)matmul_wide<ExactWeights, Tile>,
           (const void *)matmul_wide<NearWeights, Tile>}};
}

}  // namespace

// Cycles of a slab on an H200, from the times in wide.cuh at 1.755 GHz; 176 and 208 are between.
const WideShape kWideShapes[] = {
    wide_shape<WideTile<32, 4>>(1650),  wide_shape<WideTile<64, 4>>(1950),
    wide_shape<WideTile<64, 2>>(1175),  wide_shape<WideTile<128, 2>>(1590),
    wide_shape<WideTile<152, 2>>(1780), wide_shape<WideTile<176, 2>>(1930),
    wide_shape<WideTile<208, 2>>(2090), wide_shape<WideTile<256, 2>>(2290),
};

}  // namespace nf4::cuda
