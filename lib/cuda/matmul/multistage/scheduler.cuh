// The sequence of work tiles of a CTA (args.hpp, TileSchedule).
#pragma once

#include <cstdint>

#include "cuda/matmul/multistage/args.hpp"

namespace nf4::cuda {
namespace {

// A tile of y, and the K-tiles of it that this CTA multiplies.
struct TilePart {
  int n_tile;
  int m_tile;
  int k_tile;
  int k_tile_end;
  bool stores_y;   // this CTA stores y; others store their partial sums for it
  int first_peer;  // the CTAs from here up to this one have a part of the tile
};

// A CTA first computes its parts of the shared tiles, from the last to the first, then whole tiles.
// The end of its last part may belong to another CTA, which may wait for the sums. CTAs wait only
// for CTAs before them, and store their own sums before they wait. So none waits forever, as long
// as CTAs start in order.
class StreamKTiles {
 public:
  __device__ __forceinline__ explicit StreamKTiles(const TileSchedule &schedule) : of_(schedule) {}

  __device__ __forceinline__ bool is_valid() const {
    return index_ < shared_count() || whole_tile() < of_.tiles;
  }
  __device__ __forceinline__ void advance() { ++index_; }

  __device__ __forceinline__ TilePart part() const {
    if (index_ < shared_count()) return shared_part();
    TilePart part = tile_at(whole_tile());
    part.k_tile_end = of_.k_tiles;
    return part;
  }

 private:
  __device__ __forceinline__ int cta() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int whole_tile() const {
    return of_.shared_tiles + cta() + (index_ - shared_count()) * static_cast<int>(gridDim.x);
  }

  __device__ __forceinline__ TilePart tile_at(int tile) const {
    const int group = tile / (of_.raster_group * of_.n_tiles);
    const int in_group = tile - group * of_.raster_group * of_.n_tiles;
    const int first_m_tile = group * of_.raster_group;
    const int m_tiles = min(of_.raster_group, of_.m_tiles - first_m_tile);
    const int n_tile = in_group / m_tiles;
    return {n_tile, first_m_tile + in_group - n_tile * m_tiles, 0, 0, true, cta()};
  }

  // The start of a CTA's K-tiles among those of the shared tiles.
  __device__ __forceinline__ int begin(int cta) const {
    return cta * of_.cta_k_tiles + min(cta, of_.big_ctas);
  }
  // The CTA that has a given one of these K-tiles.
  __device__ __forceinline__ int owner(int k_tile) const {
    const int big = of_.big_ctas * (of_.cta_k_tiles + 1);
    return k_tile < big ? k_tile / (of_.cta_k_tiles + 1)
                        : of_.big_ctas + (k_tile - big) / of_.cta_k_tiles;
  }
  __device__ __forceinline__ int last_shared() const {
    return (begin(cta() + 1) - 1) / of_.k_tiles;
  }
  __device__ __forceinline__ int shared_count() const {
    return of_.shared_tiles == 0 ? 0 : last_shared() - begin(cta()) / of_.k_tiles + 1;
  }

  __device__ __forceinline__ TilePart shared_part() const {
    const int tile = last_shared() - index_, first = tile * of_.k_tiles;
    TilePart part = tile_at(tile);
    part.k_tile = max(begin(cta()) - first, 0);
    part.k_tile_end = min(begin(cta() + 1) - first, of_.k_tiles);
    part.stores_y = part.k_tile_end == of_.k_tiles;
    if (part.stores_y && part.k_tile > 0) part.first_peer = owner(first);
    return part;
  }

  const TileSchedule &of_;
  int index_ = 0;
};

}  // namespace
}  // namespace nf4::cuda
