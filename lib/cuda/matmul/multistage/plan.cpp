#include "cuda/matmul/multistage/plan.hpp"

#include <algorithm>

#include "cuda/matmul/multistage/tile.hpp"

namespace nf4::cuda {
namespace {

constexpr int kMaxRasterGroup = 8;
// The cost of a CTA's second tile before its first product, in K-tiles.
constexpr int kPartCost = 2;
static_assert(kPartCost < kMultistageMinKTiles);

// All CTAs share the tiles of the last wave, and of the one before it if there is one.
void share_waves(int64_t sharing, MultistagePlan &plan) {
  TileSchedule &schedule = plan.schedule;
  const int64_t shared = std::min<int64_t>(schedule.tiles, sharing + schedule.tiles % sharing);
  const int64_t tile_numbers = int64_t{schedule.k_tiles} + kPartCost;
  schedule.shared_tiles = static_cast<int>(shared);
  schedule.part_cost = kPartCost;
  schedule.cta_k_tiles = static_cast<int>(shared * tile_numbers / sharing);
  schedule.big_ctas = static_cast<int>(shared * tile_numbers % sharing);
  schedule.by_numbers = WideDivisor::of(tile_numbers);
  schedule.by_share = WideDivisor::of(schedule.cta_k_tiles);
  schedule.by_big_share = WideDivisor::of(int64_t{schedule.cta_k_tiles} + 1);
  plan.ctas = sharing;
}

// The same number of CTAs share each tile.
void share_evenly(int tile_ctas, MultistagePlan &plan) {
  TileSchedule &schedule = plan.schedule;
  schedule.shared_tiles = schedule.tiles;
  schedule.tile_ctas = tile_ctas;
  schedule.by_tile_ctas = WideDivisor::of(tile_ctas);
  plan.ctas = int64_t{schedule.tiles} * tile_ctas;
}

// Whether CTAs with one tile each, of which the longest has so many K-tiles, take less time than
// those that share all K-tiles. Most of those have parts of two tiles, and one of them adds the
// sums of a whole tile, which costs at least 2.5 K-tiles.
bool single_tiles_pay(int64_t longest, int64_t k_tiles, int64_t sharing) {
  return 2 * longest * sharing <= 2 * k_tiles + 5 * sharing;
}

}  // namespace

MultistagePlan plan_multistage(const MatmulSize &size, int config, int multiprocessors,
                               bool split_k, const MatmulWorkspace &workspace) {
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
  schedule.by_group_tiles = WideDivisor::of(schedule.raster_group * n_tiles);
  schedule.by_raster_group = WideDivisor::of(schedule.raster_group);
  schedule.by_k_tiles = WideDivisor::of(k_tiles);
  const int64_t whole = std::min<int64_t>(tiles, multiprocessors);
  const int64_t sharing = std::min({int64_t{multiprocessors}, workspace.ctas,
                                    workspace.sums_bytes / (tile.tile_m * tile.tile_n * 4),
                                    tiles * k_tiles / kMultistageMinKTiles});
  plan.ctas = whole;
  if (tiles % whole == 0 && whole == multiprocessors) return plan;
  if (sharing <= whole && sharing < multiprocessors) return plan;
  const int64_t most_ctas = std::min(sharing / tiles, k_tiles / kMultistageMinKTiles);
  const int64_t tile_ctas = std::clamp<int64_t>(split_k ? most_ctas : 1, 1, kMaxTileCtas);
  const int64_t longest = ceil_divide(tiles, whole) * ceil_divide(k_tiles, tile_ctas);
  if (!single_tiles_pay(longest, tiles * k_tiles, sharing))
    share_waves(sharing, plan);
  else if (tile_ctas > 1)
    share_evenly(static_cast<int>(tile_ctas), plan);
  return plan;
}

}  // namespace nf4::cuda
