#include "cuda/matmul/multistage/plan.hpp"

#include <algorithm>

#include "cuda/matmul/multistage/tile.hpp"

namespace nf4::cuda {
namespace {

constexpr int kMaxRasterGroup = 8;

}  // namespace

// All CTAs share the tiles of the last wave, and of the one before it if there is one.
MultistagePlan plan_multistage(const MatmulSize &size, int config, int multiprocessors,
                               const MatmulWorkspace &workspace) {
  const MatmulConfig &tile = kMatmulConfigs[config];
  const int64_t n_tiles = ceil_divide(size.rows, tile.tile_n);
  const int64_t m_tiles = ceil_divide(size.m, tile.tile_m);
  const int64_t k_tiles = size.cols / kMultistageTileK, tiles = n_tiles * m_tiles;
  MultistagePlan plan{};
  TileSchedule &schedule = plan.schedule;
  schedule.n_tiles = static_cast<int>(n_tiles);
  schedule.m_tiles = static_cast<int>(m_tiles);
  schedule.tiles = static_cast<int>(tiles);
  schedule.k_tiles = static_cast<int>(k_tiles);
  schedule.raster_group = static_cast<int>(std::min<int64_t>(m_tiles, kMaxRasterGroup));
  const int64_t whole = std::min<int64_t>(tiles, multiprocessors);
  const int64_t sharing = std::min({int64_t{multiprocessors}, workspace.ctas,
                                    workspace.sums_bytes / (tile.tile_m * tile.tile_n * 4),
                                    tiles * k_tiles / kMultistageMinKTiles});
  plan.ctas = whole;
  if (tiles % whole == 0 && whole == multiprocessors) return plan;
  if (sharing <= whole && sharing < multiprocessors) return plan;
  const int64_t shared = std::min(tiles, sharing + tiles % sharing);
  schedule.shared_tiles = static_cast<int>(shared);
  schedule.cta_k_tiles = static_cast<int>(shared * k_tiles / sharing);
  schedule.big_ctas = static_cast<int>(shared * k_tiles % sharing);
  plan.ctas = sharing;
  return plan;
}

}  // namespace nf4::cuda
