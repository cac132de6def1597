// Tile schedulers: the sequence of work tiles of a CTA. All warps of a cluster ask the same
// questions and get the same answers. m_end and n_end are the limits of a work tile, past its last
// rows of x and of the weight. The tiles of one weight lie in y where they lie in the weight;
// matmul_grouped has a scheduler for which that does not hold.
#pragma once

#include <cstdint>

#include "cuda/arch.cuh"
#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

// A tile of y, and the K-tiles of it that this CTA multiplies.
struct WorkTile {
  int n;  // its first row of the weight
  int m;  // its first row of x
  int k_tile;
  int k_tile_end;
  bool is_final_split;  // this CTA stores y; others store their partial sums for it
  int first_peer;       // the CTAs from here up to this one have a part of the tile
};

// The index of this CTA's cluster in the grid.
template <class Args>
__device__ __forceinline__ int cluster_index(const Args &args) {
  return static_cast<int>(args.cluster_divisor.divide(blockIdx.x));
}

template <class Tile>
__device__ __forceinline__ WorkTile work_tile_at(const typename Tile::Args &args, int tile) {
  int n_tile = tile, m_tile = 0;
  if (args.m_tiles > 1) {  // divisions take long
    const int group = tile / (args.raster_group * args.n_tiles);
    const int in_group = tile - group * args.raster_group * args.n_tiles;
    const int first_m_tile = group * args.raster_group;
    const int m_tiles = min(args.raster_group, args.m_tiles - first_m_tile);
    n_tile = in_group / m_tiles;
    m_tile = first_m_tile + in_group - n_tile * m_tiles;
  }
  return {n_tile * Tile::kTileN, m_tile * Tile::kTileM, 0, 0, true, static_cast<int>(blockIdx.x)};
}

// The index-th tile that this CTA's cluster computes alone: its number, and this CTA's part of it.
template <class Args>
__device__ __forceinline__ int cluster_tile(const Args &args, int index) {
  return args.stream_k_tiles + cluster_index(args) + index * args.clusters;
}
template <class Tile>
__device__ __forceinline__ WorkTile cluster_work_tile(const typename Tile::Args &args, int index) {
  WorkTile work = work_tile_at<Tile>(args, cluster_tile(args, index));
  const int rank = static_cast<int>(blockIdx.x) - cluster_index(args) * args.cluster_size;
  work.k_tile = rank * args.cta_k_tiles + min(rank, args.big_ctas);
  work.k_tile_end = work.k_tile + args.cta_k_tiles + (rank < args.big_ctas);
  return work;
}

// The K-tiles of the adapter that this CTA multiplies: the CTA with the last K-tile of the weight
// has them.
template <class Tile>
__device__ __forceinline__ int lora_k_tiles(const typename Tile::Args &args, const WorkTile &work) {
  if constexpr (Tile::Kind::kLora) return work.k_tile_end == args.k_tiles ? args.lora.k_tiles : 0;
  return 0;
}

// Waits for everything that the kernel reads, except the output of the adapter's kernel.
template <class Kind>
__device__ __forceinline__ void wait_for_inputs(const typename Kind::Args &args) {
  if constexpr (Kind::kLora)
    if (args.lora.k_tiles > 0) return pdl_wait_for_earlier<Sm90>();
  pdl_wait<Sm90>();
}

// The same; then this kernel's dependent may start.
template <class Kind>
__device__ __forceinline__ void begin_loads(const typename Kind::Args &args) {
  wait_for_inputs<Kind>(args);
  pdl_launch_dependents<Sm90>();
}

// The common parts of the schedulers for a single weight.
struct SingleWeight {
  static constexpr bool kReadsMemory = false;  // memory that the predecessor may still write
  // For a stack of experts along K, whose scales and columns lie expert after expert: the expert of
  // a work tile.
  static constexpr bool kAlongK = false;
  static __device__ __forceinline__ int expert_along_k() { return 0; }
  // For a work tile: the distance, in elements, of its part of y and of the bias from the place
  // that its row of the weight implies; and the factor of a row of y.
  __device__ __forceinline__ int64_t y_offset() const { return 0; }
  __device__ __forceinline__ int64_t bias_offset() const { return 0; }
  __device__ __forceinline__ float row_scale(int) const { return 1.0f; }
};

// Every cluster has every `clusters`-th tile.
template <class Tile>
class PersistentScheduler : public SingleWeight {
 public:
  using Args = typename Tile::Args;
  static constexpr bool kStreamK = false;

  __device__ __forceinline__ explicit PersistentScheduler(const Args &args) : args_(args) {}

  __device__ __forceinline__ bool is_valid() const {
    return cluster_tile(args_, index_) < args_.tiles;
  }
  __device__ __forceinline__ WorkTile work_tile() const {
    return cluster_work_tile<Tile>(args_, index_);
  }
  __device__ __forceinline__ void advance() { ++index_; }

  __device__ __forceinline__ int64_t m_end(const WorkTile &) const { return args_.matmul.m; }
  __device__ __forceinline__ int64_t n_end(const WorkTile &) const {
    return args_.matmul.weight.rows;
  }

 private:
  const Args &args_;
  int index_ = 0;
};

// Stream-K: a CTA first computes its parts of the tiles that all CTAs share, then whole tiles. The
// shared tiles go from the last to the first. The end of a CTA's last one may belong to another
// CTA, which may wait for the sums. CTAs wait only for CTAs before them, and store their own sums
// before they wait. Even with too few multiprocessors for all CTAs, none waits forever, as long as
// CTAs start in order.
template <class Tile>
class StreamKScheduler : public SingleWeight {
 public:
  using Args = typename Tile::Args;
  static constexpr bool kStreamK = true;

  __device__ __forceinline__ explicit StreamKScheduler(const Args &args) : args_(args) {}

  __device__ __forceinline__ bool is_valid() const {
    return index_ < shared_count() || cluster_tile(args_, index_ - shared_count()) < args_.tiles;
  }
  __device__ __forceinline__ WorkTile work_tile() const {
    return index_ < shared_count() ? shared_work_tile()
                                   : cluster_work_tile<Tile>(args_, index_ - shared_count());
  }
  __device__ __forceinline__ void advance() { ++index_; }

  __device__ __forceinline__ int64_t m_end(const WorkTile &) const { return args_.matmul.m; }
  __device__ __forceinline__ int64_t n_end(const WorkTile &) const {
    return args_.matmul.weight.rows;
  }

 private:
  __device__ __forceinline__ int cta() const { return static_cast<int>(blockIdx.x); }

  // The start of a CTA's K-tiles among those of the shared tiles.
  __device__ __forceinline__ int begin(int cta) const {
    return cta * args_.stream_k_cta_k_tiles + min(cta, args_.stream_k_big_ctas);
  }
  // The CTA that has a given one of these K-tiles.
  __device__ __forceinline__ int owner(int k_tile) const {
    const int big = args_.stream_k_big_ctas * (args_.stream_k_cta_k_tiles + 1);
    return k_tile < big ? k_tile / (args_.stream_k_cta_k_tiles + 1)
                        : args_.stream_k_big_ctas + (k_tile - big) / args_.stream_k_cta_k_tiles;
  }

  __device__ __forceinline__ int shared_count() const {
    if (args_.stream_k_tiles == 0) return 0;  // split-K
    return last_shared() - begin(cta()) / args_.k_tiles + 1;
  }
  __device__ __forceinline__ int last_shared() const {
    return (begin(cta() + 1) - 1) / args_.k_tiles;
  }

  __device__ __forceinline__ WorkTile shared_work_tile() const {
    const int tile = last_shared() - index_, first = tile * args_.k_tiles;
    WorkTile work = work_tile_at<Tile>(args_, tile);
    work.k_tile = max(begin(cta()) - first, 0);
    work.k_tile_end = min(begin(cta() + 1) - first, args_.k_tiles);
    work.is_final_split = work.k_tile_end == args_.k_tiles;
    if (work.is_final_split && work.k_tile > 0) work.first_peer = owner(first);
    return work;
  }

  const Args &args_;
  int index_ = 0;
};

// Calls visit(scheduler) at each work tile.
template <class Scheduler, class Visit>
__device__ __forceinline__ void for_each_work_tile(const typename Scheduler::Args &args,
                                                   Visit visit) {
  for (Scheduler scheduler(args); scheduler.is_valid(); scheduler.advance()) visit(scheduler);
}

}  // namespace
}  // namespace nf4::cuda
