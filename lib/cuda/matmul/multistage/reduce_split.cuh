// The reduction of tiles whose K-tiles are divided evenly among several CTAs (split-K). The CTAs of
// a tile exchange sums through L2, and each reduces a slice of the tile, in the order of the CTAs.
//
// The CTAs must run at the same time for that. CTAs start in order, so once the last CTA of a tile
// runs, all do. It announces that, and a CTA that knows it when its sums are complete reduces its
// slice. The other CTAs leave their slices to the last CTA and end, so that none waits for a CTA
// that may not have started.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "cuda/matmul/multistage/partials.cuh"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/runtime/signature.hpp"

namespace nf4::cuda {
namespace {

// A slice consists of pieces. A piece is 8 rows of x by the rows of the weight of a warp, which any
// warp may reduce.
template <class Args, int MTiles>
class SplitKReduction {
  static constexpr int kTogether = 8;  // CTAs whose sums are in flight

 public:
  using PieceSums = float[2][1][4];

  __device__ __forceinline__ explicit SplitKReduction(const Args &args)
      : partials_(args), signature_(args.signature), ctas_(args.schedule.tile_ctas) {
    first_cta_ = static_cast<int>(args.schedule.by_tile_ctas.divide(blockIdx.x)) * ctas_;
    rank_ = static_cast<int>(blockIdx.x) - first_cta_;
  }

  // Comes first in the kernel. All threads call it: a condition on one of them would make the
  // compiler treat its warp as diverged in the mainloop, too.
  __device__ __forceinline__ void announce() const {
    if (is_last()) store_flag(kRuns, ::cuda::memory_order_relaxed);
  }

  // Whether all CTAs of the tile run, by this thread's knowledge.
  __device__ __forceinline__ bool all_run() const {
    return is_last() || flag(ctas_ - 1).load(::cuda::memory_order_relaxed) - signature_ < kStates;
  }

  // Once the sums of all CTAs are stored, those of m_tiles times 8 rows of x, reduces and calls
  // finish(warp, m_tile, sums) for each piece of this CTA's slice, if any thread knows that
  // all_run().
  template <class Finish>
  __device__ __forceinline__ void reduce(bool all_run, int m_tiles, Finish finish) const {
    const bool takes = __syncthreads_or(all_run);
    if (threadIdx.x == 0) store_flag(takes ? kTakes : kStored, ::cuda::memory_order_release);
    if (!takes) return;
    uint32_t slices = wait_for_sums() | 1u << rank_;
    __syncthreads();
    if (!is_last()) {
      if (threadIdx.x == 0) store_flag(kRead, ::cuda::memory_order_relaxed);
      slices = 1u << rank_;
    }
    for (; slices != 0; slices &= slices - 1) reduce_slice(__ffs(slices) - 1, m_tiles, finish);
    if (is_last()) clear_flags();
  }

 private:
  // A CTA's flag adds one of these to the signature. kStored: its sums are stored, and its slice is
  // left to the last CTA. kTakes: its sums are stored, and it reduces its slice. kRead: it has also
  // read the flags of the others. kRuns: the CTA, a tile's last one, runs.
  enum State : uint32_t { kStored, kTakes, kRead, kRuns, kStates };
  static_assert(kStates <= kSignatures);
  static_assert(kMaxTileCtas <= 32, "a lane and a bit for each CTA of a tile");
  using Partials = StreamKPartials<Args, MTiles>;
  using Flag = typename Partials::Flag;

  __device__ __forceinline__ bool is_last() const { return rank_ == ctas_ - 1; }
  __device__ __forceinline__ Flag flag(int rank) const { return partials_.flag(first_cta_ + rank); }
  __device__ __forceinline__ void store_flag(State state, ::cuda::memory_order order) const {
    flag(rank_).store(signature_ + state, order);
  }

  // Each lane waits for the sums of a CTA. Returns the slices that are left to the last CTA.
  __device__ __forceinline__ uint32_t wait_for_sums() const {
    const int rank = min(static_cast<int>(threadIdx.x % 32), ctas_ - 1);
    uint64_t state;
    do {
      state = flag(rank).load(::cuda::memory_order_acquire) - signature_;
    } while (__any_sync(0xffffffffu, state >= kRuns));
    return __ballot_sync(0xffffffffu, state == kStored) &
           static_cast<uint32_t>((uint64_t{1} << ctas_) - 1);
  }

  template <class Finish>
  __device__ __forceinline__ void reduce_slice(int slice, int m_tiles, Finish finish) const {
    const int pieces = m_tiles * kMultistageWarps, end = (slice + 1) * pieces / ctas_;
#pragma unroll 1
    for (int piece = slice * pieces / ctas_ + static_cast<int>(threadIdx.x / 32); piece < end;
         piece += kMultistageWarps) {
      const int warp = piece % kMultistageWarps, m_tile = piece / kMultistageWarps;
      PieceSums sums = {};
#pragma unroll 1
      for (int first = 0; first < ctas_; first += kTogether) {
        float4 all[kTogether][2];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
#pragma unroll
          for (int f = 0; f < 2; ++f)
            all[i][f] = first + i < ctas_ ? partials_.load(first_cta_ + first + i, warp, f, m_tile)
                                          : float4{};
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
#pragma unroll
          for (int f = 0; f < 2; ++f) add(sums[f][0], all[i][f]);
      }
      finish(warp, m_tile, sums);
    }
  }

  // For the next launch with these arguments, once all have read the flags.
  __device__ __forceinline__ void clear_flags() const {
    const int rank = static_cast<int>(threadIdx.x);
    if (rank >= 32) return;
    if (rank < ctas_ && rank != rank_)
      while (flag(rank).load(::cuda::memory_order_acquire) == signature_ + kTakes) continue;
    __syncwarp();
    if (rank < ctas_) flag(rank).store(0, ::cuda::memory_order_relaxed);
  }

  const Partials partials_;
  const uint64_t signature_;
  const int ctas_;
  int rank_;
  int first_cta_;
};

}  // namespace
}  // namespace nf4::cuda
