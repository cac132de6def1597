// Reductions of partial sums between the CTAs that share a tile (CUTLASS's fix-up), in a fixed
// order: stream-K through L2, clusters through each other's shared memory.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "cuda/matmul/wgmma/args.hpp"
#include "cuda/matmul/wgmma/consumer.cuh"
#include "cuda/matmul/workspace.hpp"
#include "cuda/ptx/cluster.cuh"

namespace nf4::cuda {
namespace {

// A thread's part of the stream-K workspace. Threads with equal numbers exchange sums between CTAs.
template <class Tile>
class StreamKReduction {
 public:
  __device__ __forceinline__ explicit StreamKReduction(const typename Tile::Args &args)
      : args_(args) {}

  // Stores this CTA's sums for the CTA that stores y.
  __device__ __forceinline__ void store_partials(const typename Tile::Accumulators &sums) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      __stcg(partials(cta(), i),
             float4{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]});
    // The order matters: a fence covers the stores that its own thread has seen, which after
    // __syncwarp are those of all lanes.
    __syncwarp();
    __threadfence();
    if (lane_index() == 0) flag(cta()).store(args_.signature, ::cuda::memory_order_relaxed);
  }

  // Adds the sums of the CTAs from first_peer up to this one, and clears their flags for the next
  // launch with these arguments.
  __device__ __forceinline__ void reduce_partials(int first_peer,
                                                  typename Tile::Accumulators &sums) const {
    if constexpr (Tile::Kind::kGroups) {
      wait_for_all(first_peer);
#pragma unroll 1
      for (int peer = first_peer; peer < cta(); peer += kTogether) add_together(peer, sums);
    } else {
#pragma unroll 1
      for (int peer = first_peer; peer < cta(); ++peer) {
        wait_for(peer);
        add_partials(peer, sums);
      }
    }
  }

 private:
  static_assert(Tile::kConsumers / 32 <= MatmulWorkspace::kFlags, "each warp has a flag");
  static constexpr int kColumns = Tile::kTileM / 8;
  static constexpr uint32_t kAllLanes = 0xffffffff;
  using Flag = ::cuda::atomic_ref<uint64_t, ::cuda::thread_scope_device>;

  static __device__ __forceinline__ int cta() { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ Flag flag(int cta) const {
    return Flag(args_.flags[cta * MatmulWorkspace::kFlags + consumer_thread() / 32]);
  }
  // This thread's part of 8 columns of a CTA's sums.
  __device__ __forceinline__ float4 *partials(int cta, int column) const {
    return args_.partials + (cta * kColumns + column) * Tile::kConsumers + consumer_thread();
  }

  __device__ __forceinline__ void wait_for(int peer) const {
    // All lanes wait: if only one did, the compiler would treat the warp as diverged (10 % slower).
    while (__any_sync(kAllLanes, flag(peer).load(::cuda::memory_order_acquire) != args_.signature))
      continue;
    if (lane_index() == 0) flag(peer).store(0, ::cuda::memory_order_relaxed);
  }
  __device__ __forceinline__ void add_partials(int peer, typename Tile::Accumulators &sums) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) add(__ldcg(partials(peer, i)), i, sums);
  }
  static __device__ __forceinline__ void add(const float4 &partial, int column,
                                             typename Tile::Accumulators &sums) {
    sums[4 * column] += partial.x;
    sums[4 * column + 1] += partial.y;
    sums[4 * column + 2] += partial.z;
    sums[4 * column + 3] += partial.w;
  }

  // The peers whose partial sums are in flight at the same time, as registers allow.
  static constexpr int kTogether = kColumns < 16 ? 16 / kColumns : 1;

  // The same for all peers at once: each lane waits for a peer.
  __device__ __forceinline__ void wait_for_all(int first_peer) const {
#pragma unroll 1
    for (int first = first_peer; first < cta(); first += 32) {
      const int peer = first + lane_index();
      while (__any_sync(kAllLanes, peer < cta() && flag(peer).load(::cuda::memory_order_acquire) !=
                                                       args_.signature))
        continue;
      if (peer < cta()) flag(peer).store(0, ::cuda::memory_order_relaxed);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void add_together(int first, typename Tile::Accumulators &sums) const {
    if constexpr (kTogether == 1) {
      add_partials(first, sums);
    } else {
      float4 all[kTogether][kColumns];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
          all[i][column] = __ldcg(partials(min(first + i, cta() - 1), column));
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= cta()) break;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) add(all[i][column], column, sums);
      }
    }
  }

  const typename Tile::Args &args_;
};

// Each CTA of a cluster gets an equal share of the tile's columns of 8 from all CTAs, in the shared
// memory of the LUT and the pipelines. With wide tiles it reduces a part of kPartColumns while the
// next parts are in flight; distributed shared memory sends 15 bytes a cycle.
template <class Tile>
class ClusterReduction {
 public:
  __device__ __forceinline__ ClusterReduction(SharedStorage<Tile> shared, int cluster_size)
      : shared_(shared),
        cluster_size_(cluster_size),
        share_((kColumns + cluster_size - 1) / cluster_size),
        rank_(static_cast<int>(cluster_rank())) {}

  // The producers call it while the other warps multiply. It says what each part waits for, and
  // takes part in the barriers of exchange().
  __device__ __forceinline__ void prepare() const {
    if (kParts > 0 && threadIdx.x == 0) {
#pragma unroll 1
      for (int part = 0; part * kPartColumns < columns(); ++part)
        mbarrier_arrive_expect_tx(shared_.partials(part),
                                  (cluster_size_ - 1) *
                                      min(kPartColumns, columns() - part * kPartColumns) *
                                      Tile::kConsumers * 16);
    }
    cluster_sync_relaxed();
    if constexpr (kParts == 0) cluster_sync();
  }

  // Sends the sums; if a share has two parts, the first parts of all shares go first. Sending to
  // this CTA itself with st.async would take as long as to others.
  __device__ __forceinline__ void exchange(const typename Tile::Accumulators &all) const {
    constexpr int kHalf = (kColumns + 1) / 2;
    cluster_sync_relaxed();  // the pipelines are not read any more
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) {
      const int column = kParts == 0 ? i : i % 2 * kHalf + i / 2;
      if (column >= kColumns) continue;
      const int owner = column / share_, in_share = column - owner * share_;
      const int to = offset(rank_, in_share);
      const float4 sums{all[column * 4], all[column * 4 + 1], all[column * 4 + 2],
                        all[column * 4 + 3]};
      if constexpr (kParts == 0)
        store_shared_cluster(map_shared_rank(shared_.base, owner) + to, sums);
      else if (owner == rank_)
        *reinterpret_cast<float4 *>(shared_.base + to) = sums;
      else
        store_async_cluster(map_shared_rank(shared_.base, owner) + to, sums,
                            map_shared_rank(shared_.partials(in_share / kPartColumns), owner));
    }
    if constexpr (kParts == 0) cluster_sync();
  }

  // Waits for the part of the share that begins at `column`. A CTA ends when it has all parts.
  __device__ __forceinline__ void wait(int column) const {
    if constexpr (kParts > 0) mbarrier_wait_parity(shared_.partials(column / kPartColumns), 0);
  }

  // This CTA's share of the columns.
  __device__ __forceinline__ int first_column() const { return rank_ * share_; }
  __device__ __forceinline__ int columns() const { return min(share_, kColumns - first_column()); }

  // The sums of Count columns of the share from `column` on, in the order of the CTAs.
  template <int Count>
  __device__ __forceinline__ void reduce(int column, float (&sums)[Count * 4]) const {
    for (int source = 0; source < cluster_size_; ++source)
#pragma unroll
      for (int i = 0; i < Count; ++i)
        if (column + i < columns()) add_partial(sums, i, offset(source, column + i));
  }

 private:
  static constexpr int kColumns = Tile::kTileM / 8;
  static constexpr int kPartColumns = SharedLayout<Tile>::kPartColumns;
  static constexpr int kParts = SharedLayout<Tile>::kParts;

  __device__ __forceinline__ int offset(int source, int column) const {
    return ((source * share_ + column) * Tile::kConsumers + consumer_thread()) * 16;
  }
  template <int Size>
  __device__ __forceinline__ void add_partial(float (&sums)[Size], int column, int offset) const {
    const float4 partial = *reinterpret_cast<const float4 *>(shared_.base + offset);
    sums[column * 4] += partial.x;
    sums[column * 4 + 1] += partial.y;
    sums[column * 4 + 2] += partial.z;
    sums[column * 4 + 3] += partial.w;
  }

  const SharedStorage<Tile> shared_;
  const int cluster_size_;
  const int share_;
  const int rank_;
};

}  // namespace
}  // namespace nf4::cuda
