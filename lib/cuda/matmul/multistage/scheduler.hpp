// How the tiles of y are divided among the CTAs of a multistage kernel. No CUDA types: tests run
// the same code without a GPU.
#pragma once

#include <algorithm>

#include "core/macros.hpp"
#include "cuda/runtime/fast_divide.hpp"

namespace nf4::cuda {

// All CTAs share the K-tiles of the first shared_tiles tiles, as many as the last waves of whole
// tiles would have (stream-K). Those K-tiles are numbered one tile after the other, with a gap of
// part_cost numbers before each tile. A CTA has cta_k_tiles numbers, and one more if it is among
// the first big_ctas: a CTA that begins a second tile has fewer K-tiles for it. Of the other tiles,
// each CTA has every ctas-th.
struct TileSchedule {
  int tiles;
  int n_tiles;
  int m_tiles;
  int raster_group;  // tiles of x that each row of tiles of the weight meets before the next row
  int k_tiles;       // K-tiles of one tile
  int part_cost;
  int shared_tiles;
  int cta_k_tiles;
  int big_ctas;
  int tile_ctas;  // 0, or this many CTAs share each tile evenly instead (split-K)
  // Divisions by raster_group * n_tiles, k_tiles + part_cost, cta_k_tiles, cta_k_tiles + 1, and
  // what is above.
  WideDivisor by_group_tiles, by_numbers, by_share, by_big_share, by_raster_group, by_k_tiles,
      by_tile_ctas;
};

// A tile of y, and the K-tiles of it that this CTA multiplies.
struct TilePart {
  int n_tile;
  int m_tile;
  int k_tile;
  int k_tile_end;
  bool stores_y;   // this CTA stores y; others store their partial sums for it
  int first_peer;  // the CTAs from here up to this one have a part of the tile
};

// The sequence of work tiles of a CTA. It first computes its parts of the shared tiles, from the
// last to the first, then whole tiles. The end of its last part may belong to another CTA, which
// may wait for the sums. CTAs wait only for CTAs before them, and store their own sums before they
// wait. So none waits forever, as long as CTAs start in order.
//
// Grid: cta() and ctas(), the number of this CTA and of all.
template <class Grid>
class StreamKTiles {
 public:
  NF4_HOST_DEVICE explicit StreamKTiles(const TileSchedule &schedule, Grid grid = {})
      : of_(schedule), grid_(grid) {}

  NF4_HOST_DEVICE bool is_valid() const {
    return index_ < shared_count() || whole_tile() < of_.tiles;
  }
  NF4_HOST_DEVICE void advance() { ++index_; }

  NF4_HOST_DEVICE TilePart part() const {
    if (index_ < shared_count()) return shared_part();
    TilePart part = tile_at(whole_tile());
    part.k_tile_end = of_.k_tiles;
    return part;
  }

 private:
#if defined(__CUDACC__)  // where std::min is for the host alone
  static NF4_HOST_DEVICE int least(int a, int b) { return min(a, b); }
  static NF4_HOST_DEVICE int most(int a, int b) { return max(a, b); }
#else
  static int least(int a, int b) { return std::min(a, b); }
  static int most(int a, int b) { return std::max(a, b); }
#endif

  NF4_HOST_DEVICE int whole_tile() const {
    return of_.shared_tiles + grid_.cta() + (index_ - shared_count()) * grid_.ctas();
  }

  static NF4_HOST_DEVICE int divide(int number, const WideDivisor &by) {
    return static_cast<int>(by.divide(static_cast<uint32_t>(number)));
  }

  NF4_HOST_DEVICE TilePart tile_at(int tile) const {
    TilePart part{tile, 0, 0, 0, true, grid_.cta()};
    if (of_.m_tiles == 1) return part;
    const int group = divide(tile, of_.by_group_tiles);
    const int first_m_tile = group * of_.raster_group;
    const int m_tiles = least(of_.raster_group, of_.m_tiles - first_m_tile);
    const int in_group = tile - first_m_tile * of_.n_tiles;
    part.n_tile =
        m_tiles == of_.raster_group ? divide(in_group, of_.by_raster_group) : in_group / m_tiles;
    part.m_tile = first_m_tile + in_group - part.n_tile * m_tiles;
    return part;
  }

  // The start of a CTA's K-tiles among those of the shared tiles, without gaps.
  NF4_HOST_DEVICE int begin(int cta) const {
    if (of_.tile_ctas > 0) {
      const int tile = divide(cta, of_.by_tile_ctas), rank = cta - tile * of_.tile_ctas;
      return tile * of_.k_tiles + divide(rank * of_.k_tiles, of_.by_tile_ctas);
    }
    const int number = cta * of_.cta_k_tiles + least(cta, of_.big_ctas);
    const int tile = divide(number, of_.by_numbers);
    const int first = tile * (of_.k_tiles + of_.part_cost) + of_.part_cost;
    return tile * of_.k_tiles + most(number - first, 0);
  }
  // The CTA that has the first of a tile's K-tiles.
  NF4_HOST_DEVICE int first_owner(int tile) const {
    if (of_.tile_ctas > 0) return tile * of_.tile_ctas;
    const int number = tile * (of_.k_tiles + of_.part_cost) + of_.part_cost;
    const int big = of_.big_ctas * (of_.cta_k_tiles + 1);
    return number < big ? divide(number, of_.by_big_share)
                        : of_.big_ctas + divide(number - big, of_.by_share);
  }
  NF4_HOST_DEVICE int last_shared() const {
    return divide(begin(grid_.cta() + 1) - 1, of_.by_k_tiles);
  }
  NF4_HOST_DEVICE int shared_count() const {
    return of_.shared_tiles == 0 ? 0
                                 : last_shared() - divide(begin(grid_.cta()), of_.by_k_tiles) + 1;
  }

  NF4_HOST_DEVICE TilePart shared_part() const {
    const int tile = last_shared() - index_, first = tile * of_.k_tiles;
    TilePart part = tile_at(tile);
    part.k_tile = most(begin(grid_.cta()) - first, 0);
    part.k_tile_end = least(begin(grid_.cta() + 1) - first, of_.k_tiles);
    part.stores_y = part.k_tile_end == of_.k_tiles;
    if (part.stores_y && part.k_tile > 0) part.first_peer = first_owner(tile);
    return part;
  }

  const TileSchedule &of_;
  Grid grid_;
  int index_ = 0;
};

}  // namespace nf4::cuda
