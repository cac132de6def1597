// How the tiles of y are divided among the CTAs of a multistage kernel. No CUDA types: tests run
// the same code without a GPU.
#pragma once

#include <algorithm>

#include "core/macros.hpp"

namespace nf4::cuda {

// All CTAs share the K-tiles of the first shared_tiles tiles, as many as the last waves of whole
// tiles would have (stream-K): those K-tiles are numbered one tile after the other, and a CTA has
// cta_k_tiles of them, and one more if it is among the first big_ctas. Of the other tiles, each CTA
// has every ctas-th.
struct TileSchedule {
  int tiles;
  int n_tiles;
  int m_tiles;
  int raster_group;  // tiles of x that each row of tiles of the weight meets before the next row
  int k_tiles;       // of a tile
  int shared_tiles;
  int cta_k_tiles;
  int big_ctas;
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

  NF4_HOST_DEVICE TilePart tile_at(int tile) const {
    const int group = tile / (of_.raster_group * of_.n_tiles);
    const int in_group = tile - group * of_.raster_group * of_.n_tiles;
    const int first_m_tile = group * of_.raster_group;
    const int m_tiles = least(of_.raster_group, of_.m_tiles - first_m_tile);
    const int n_tile = in_group / m_tiles;
    return {n_tile, first_m_tile + in_group - n_tile * m_tiles, 0, 0, true, grid_.cta()};
  }

  // The start of a CTA's K-tiles among those of the shared tiles.
  NF4_HOST_DEVICE int begin(int cta) const {
    return cta * of_.cta_k_tiles + least(cta, of_.big_ctas);
  }
  // The CTA that has a given one of these K-tiles.
  NF4_HOST_DEVICE int owner(int k_tile) const {
    const int big = of_.big_ctas * (of_.cta_k_tiles + 1);
    return k_tile < big ? k_tile / (of_.cta_k_tiles + 1)
                        : of_.big_ctas + (k_tile - big) / of_.cta_k_tiles;
  }
  NF4_HOST_DEVICE int last_shared() const { return (begin(grid_.cta() + 1) - 1) / of_.k_tiles; }
  NF4_HOST_DEVICE int shared_count() const {
    return of_.shared_tiles == 0 ? 0 : last_shared() - begin(grid_.cta()) / of_.k_tiles + 1;
  }

  NF4_HOST_DEVICE TilePart shared_part() const {
    const int tile = last_shared() - index_, first = tile * of_.k_tiles;
    TilePart part = tile_at(tile);
    part.k_tile = most(begin(grid_.cta()) - first, 0);
    part.k_tile_end = least(begin(grid_.cta() + 1) - first, of_.k_tiles);
    part.stores_y = part.k_tile_end == of_.k_tiles;
    if (part.stores_y && part.k_tile > 0) part.first_peer = owner(first);
    return part;
  }

  const TileSchedule &of_;
  Grid grid_;
  int index_ = 0;
};

}  // namespace nf4::cuda
