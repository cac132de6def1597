// How the CTAs of a skinny kernel and their warps share the work, of any kind of weight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/matmul/skinny/args.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// The size of equal groups, so that none is nearly empty.
inline int even_groups(int64_t tiles, int64_t most) {
  return static_cast<int>(ceil_divide(tiles, ceil_divide(tiles, std::min(tiles, most))));
}

// How `ctas` CTAs share `units` units of rows of `cols` columns.
inline void plan_work(int64_t units, int64_t cols, int64_t ctas, const SkinnyLayout &layout,
                      SkinnyWork &work) {
  const int64_t k_tiles = ceil_divide(cols, kWarpTileK);
  work.cta_units = static_cast<int>(units / ctas);
  work.big_ctas = static_cast<int>(units % ctas);
  work.k_tiles = static_cast<int>(k_tiles);
  work.k_warps = static_cast<int>(std::min<int64_t>(k_tiles, layout.warps));
  work.n_warps = layout.warps / work.k_warps;
  work.k_tiles_divisor = WideDivisor::of(std::max<int64_t>(k_tiles, 1));
  work.k_warps_divisor = FastDivisor::of(work.k_warps);
}

}  // namespace nf4::cuda
