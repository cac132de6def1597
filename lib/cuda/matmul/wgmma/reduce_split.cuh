// The reduction of split-K in the stream-K kernels, whose CTAs need not be clusters. The CTAs that
// share a tile are neighbours in the grid, exchange sums through L2, and each reduce a slice of the
// tile, in a fixed order.
//
// The CTAs must run at the same time for that. CTAs start in order, so once the last CTA of a tile
// runs, all do. It announces that, and a CTA that knows it when its sums are complete reduces its
// slice. The other CTAs leave their slices to the last CTA and end, so that none waits for a CTA
// that may not have started.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "cuda/matmul/wgmma/consumer.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/matmul/wgmma/shared.cuh"
#include "cuda/matmul/workspace.hpp"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/runtime/signature.hpp"

namespace nf4::cuda {
namespace {

// Slices are whole columns of 8 rows of x; the tile has `columns` of them.
template <class Tile>
class SplitKReduction {
  static constexpr int kTileColumns = Tile::kTileM / 8;

 public:
  // The columns that are reduced at once.
  static constexpr int kColumns = kTileColumns >= 16 ? 4 : kTileColumns >= 8 ? 2 : 1;

  __device__ __forceinline__ SplitKReduction(const typename Tile::Args &args,
                                             SharedStorage<Tile> shared, int columns)
      : args_(args),
        own_(reinterpret_cast<float4 *>(shared.base) + consumer_thread()),
        first_cta_(cluster_index(args) * args.cluster_size),
        rank_(static_cast<int>(blockIdx.x) - first_cta_),
        columns_(columns),
        slice_columns_((columns + args.cluster_size - 1) / args.cluster_size) {}

  // A thread of the producers calls it, once it may write to the workspace. Here and elsewhere in
  // this file, a condition on one thread of the consumers would make the compiler treat its warp as
  // diverged in the mainloop too (10 % slower).
  static __device__ __forceinline__ void announce(const typename Tile::Args &args) {
    const int cta = static_cast<int>(blockIdx.x);
    if ((cta + 1) % args.cluster_size == 0)
      Flag(args.flags[cta * MatmulWorkspace::kFlags])
          .store(args.signature + kRuns, ::cuda::memory_order_relaxed);
  }

  // Stores the sums. Once those of all CTAs are there, returns the slices to reduce, one bit each.
  // It overwrites the mainloop's shared memory.
  __device__ __forceinline__ uint32_t exchange(const typename Tile::Accumulators &sums) const {
    const bool takes = this->takes();
    const int own = takes ? rank_ * slice_columns_ : columns_;
#pragma unroll
    for (int i = 0; i < kTileColumns; ++i) {
      const float4 sum{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
      if (i >= own && i < own + slice_columns_)
        own_[(i - own) * Tile::kConsumers] = sum;
      else if (i < columns_)
        __stcg(partials(rank_, i), sum);
    }
    // The order matters: a fence covers the stores that its own thread has seen, which after
    // __syncwarp are those of all lanes.
    __syncwarp();
    __threadfence();
    store_flag(takes ? kTakes : kStored);
    if (!takes) return 0;
    const uint32_t left = __ballot_sync(kAllLanes, wait_for(kStored) == kStored);
    if (is_last()) return left | 1u << rank_;
    store_flag(kRead);
    return 1u << rank_;
  }

  __device__ __forceinline__ int first_column(int slice) const { return slice * slice_columns_; }
  __device__ __forceinline__ int end_column(int slice) const {
    return min(columns_, (slice + 1) * slice_columns_);
  }

  // The sums of kColumns columns of the slice from `column` on, in the order of the CTAs.
  __device__ __forceinline__ void reduce(int slice, int column, float *sums) const {
    // Limited by registers.
    constexpr int kTogether = Tile::kWarpgroups > 2 || kColumns == 4 ? 4 : 8;
#pragma unroll 1
    for (int first = 0; first < args_.cluster_size; first += kTogether) {
      float4 all[kTogether][kColumns];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          all[i][j] = first + i < args_.cluster_size && column + j < end_column(slice)
                          ? load(first + i, slice, column + j)
                          : float4{};
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          sums[4 * j] += all[i][j].x;
          sums[4 * j + 1] += all[i][j].y;
          sums[4 * j + 2] += all[i][j].z;
          sums[4 * j + 3] += all[i][j].w;
        }
    }
  }

  // The last CTA clears the flags for the next launch with these arguments, when all have read
  // them.
  __device__ __forceinline__ void finish() const {
    if (!is_last()) return;
    wait_for(kRead);
    __syncwarp();
    if (lane_index() < args_.cluster_size)
      flag(lane_index(), consumer_thread() / 32).store(0, ::cuda::memory_order_relaxed);
  }

 private:
  // The state that a warp's flag adds to the signature. kStored: its sums are stored, and its slice
  // is left to the last CTA. kTakes: its sums are stored, and it takes its slice. kRead: it has
  // read the flags of the others. kRuns is set before these, by the last CTA's first warp: the CTA
  // runs.
  enum State : uint32_t { kStored, kTakes, kRead, kRuns, kStates };
  static_assert(kStates <= kSignatures);
  static_assert(Tile::kConsumers / 32 <= MatmulWorkspace::kFlags, "each warp has a flag");
  static_assert((kTileColumns + 1) / 2 * Tile::kConsumers * 16 <= SharedLayout<Tile>::kSubtiles);
  static constexpr uint32_t kAllLanes = 0xffffffff;
  static constexpr int kBarrier = 1;  // a named barrier of the consumers
  using Flag = ::cuda::atomic_ref<uint64_t, ::cuda::thread_scope_device>;

  __device__ __forceinline__ bool is_last() const { return rank_ == args_.cluster_size - 1; }
  __device__ __forceinline__ Flag flag(int rank, int warp) const {
    return Flag(args_.flags[(first_cta_ + rank) * MatmulWorkspace::kFlags + warp]);
  }
  __device__ __forceinline__ void store_flag(State state) const {
    if (lane_index() == 0)
      flag(rank_, consumer_thread() / 32)
          .store(args_.signature + state, ::cuda::memory_order_relaxed);
  }
  // This thread's part of 8 columns of a CTA's sums.
  __device__ __forceinline__ float4 *partials(int rank, int column) const {
    return args_.partials + ((first_cta_ + rank) * kTileColumns + column) * Tile::kConsumers +
           consumer_thread();
  }
  __device__ __forceinline__ float4 load(int rank, int slice, int column) const {
    return rank == rank_ && slice == rank_ ? own_[(column - first_column(slice)) * Tile::kConsumers]
                                           : __ldcg(partials(rank, column));
  }

  // The same for all consumers; all of them have left the mainloop then.
  __device__ __forceinline__ bool takes() const {
    const uint64_t last =
        flag(args_.cluster_size - 1, 0).load(::cuda::memory_order_relaxed) - args_.signature;
    return __any_sync(kAllLanes,
                      named_barrier_or(kBarrier, Tile::kConsumers, is_last() || last < kStates));
  }

  // Each lane waits for a CTA, until its flag is at least `state` or says that the CTA has left.
  // Returns the flag.
  __device__ __forceinline__ uint32_t wait_for(State state) const {
    const int rank = min(lane_index(), args_.cluster_size - 1);
    uint64_t found;
    // Only other CTAs wait for the last one, which does not leave.
    const auto waits = [&] {
      found =
          flag(rank, consumer_thread() / 32).load(::cuda::memory_order_acquire) - args_.signature;
      return found >= kRuns || (found == kTakes && state == kRead && rank != rank_);
    };
    while (__any_sync(kAllLanes, waits())) continue;
    return static_cast<uint32_t>(found);
  }

  const typename Tile::Args &args_;
  float4 *const own_;
  const int first_cta_;
  const int rank_;
  const int columns_;
  const int slice_columns_;
};

}  // namespace
}  // namespace nf4::cuda
