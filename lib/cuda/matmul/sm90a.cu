#include "cuda/matmul/wide.cuh"
#include "cuda/matmul/wide.hpp"

namespace nf4::cuda {
namespace {

template <class Tile>
WideShape wide_shape() {
  return {Tile::kColumns,
          Tile::kRows,
          128 * (Tile::kWarpgroups + 1),
          WideLayout<Tile>::kBytes,
          Tile::kHalves,
          {(const void *)matmul_wide<ExactWeights, Tile>,
           (const void *)matmul_wide<NearWeights, Tile>},
          (const void *)matmul_wide<FastWeights, Tile>};
}

}  // namespace

const WideShape kWideShapes[] = {
    wide_shape<WideTile<32, 4>>(),  wide_shape<WideTile<64, 4>>(),  wide_shape<WideTile<64, 2>>(),
    wide_shape<WideTile<112, 2>>(), wide_shape<WideTile<128, 2>>(), wide_shape<WideTile<152, 2>>(),
    wide_shape<WideTile<192, 2>>(), wide_shape<WideTile<256, 2>>(),
};

}  // namespace nf4::cuda
