// The epilogue of a consumer thread: reduces the sums of CTAs that share a tile, adds the bias and
// stores y.
#pragma once

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/matmul/wgmma/consumer.cuh"
#include "cuda/matmul/wgmma/reduce.cuh"
#include "cuda/matmul/wgmma/reduce_split.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"

namespace nf4::cuda {
namespace {

template <class T, class Tile>
class Epilogue {
 public:
  // Sums are multiplied by `unit`.
  __device__ __forceinline__ Epilogue(const typename Tile::Args &args, SharedStorage<Tile> shared,
                                      float unit)
      : args_(args), shared_(shared), unit_(unit) {}

  __device__ __forceinline__ float unit() const { return unit_; }

  template <class Scheduler>
  __device__ __forceinline__ void store(const Scheduler &scheduler,
                                        typename Tile::Accumulators &all) {
    const WorkTile work = scheduler.work_tile();
    const Limits limits{scheduler.m_end(work), scheduler.n_end(work)};
    if constexpr (Scheduler::kStreamK) {
      if constexpr (Tile::kSplitK)
        if (args_.cluster_size > 1) return store_split(scheduler, work, limits, all);
      const StreamKReduction<Tile> reduction(args_);
      if (!work.is_final_split) return reduction.store_partials(all);
      reduction.reduce_partials(work.first_peer, all);
    } else if (args_.cluster_size > 1) {
      return store_cluster(scheduler, work, limits, all);
    }
    const int count = static_cast<int>(min(limits.m - work.m, int64_t{Tile::kTileM}));
    if constexpr (kHasWholeTiles && !Scheduler::kReadsMemory)
      if (args_.y_vectors && count == Tile::kTileM && work.n + Tile::kTileN <= limits.n)
        return store_tile<true>(scheduler, work, limits, Tile::kTileM, all);
    store_tile<false>(scheduler, work, limits, count, all);
  }

 private:
  using Layout = typename Tile::Layout;
  static constexpr int kFirstBarrier = 3;  // named barriers of the warps that store together
  // The warps that store y together, so that rows of it are whole lines of L2. With few rows of x,
  // waiting for each other takes longer than that saves.
  static constexpr int kStoreWarps = Tile::kTileM > 64 ? 4 : Layout::kWarpPairs ? 2 : 1;
  static constexpr int kChunks = 2 * kStoreWarps;  // 16 bytes of y each
  static constexpr int kSubtileM = SharedLayout<Tile>::kSubtileBytes / 32;
  static constexpr int kHalfM = kSubtileM / 2;  // rows of x that are stored at once
  static_assert(kHalfM == 32 * kStoreWarps / kChunks);
  // There is separate code for tiles of which all of y exists and vectors store it, with no branch
  // around a store. Narrow tiles gain nothing from it, and tiles of experts are seldom whole.
  static constexpr bool kHasWholeTiles = Tile::kTileM > 128;

  struct Limits {
    int64_t m;
    int64_t n;
  };

  // The bias of this lane's two rows, from `row` on.
  struct Bias {
    float values[2];
    template <class Scheduler, class Matmul>
    __device__ __forceinline__ Bias(const Scheduler &scheduler, const Matmul &matmul, int row,
                                    int64_t n_end) {
      const T *bias = static_cast<const T *>(matmul.bias);
      constexpr int kDistance = Layout::kRowDistance;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        values[half] = bias != nullptr && row + half * kDistance < n_end
                           ? to_float(bias[scheduler.bias_offset() + row + half * kDistance])
                           : 0.0f;
    }
  };

  // The place where this thread stores: eight neighbours of one row in each half of a subtile.
  class Output {
   public:
    // For rows of x from m on, and for the rows of the weight from n on, which end at n_end.
    template <class Scheduler>
    __device__ __forceinline__ Output(const Scheduler &scheduler, const typename Tile::Args &args,
                                      int n, int64_t n_end, int m)
        : stride_(args.matmul.y_stride) {
      const int thread = static_cast<int>(threadIdx.x % (32 * kStoreWarps));
      // This does not use lane_row(): 32x256 stream-K would compute the weight's address anew in
      // each step.
      const int first =
          n + consumer_thread() / 32 / kStoreWarps * kStoreWarps * 16 + thread % kChunks * 8;
      elements_ = static_cast<int>(min(n_end - first, int64_t{8}));
      vectors_ = args.y_vectors && elements_ == 8;
      y_ = static_cast<T *>(args.matmul.y) + scheduler.y_offset() +
           (m + thread / kChunks) * stride_ + first;
    }

    // Stores all eight numbers, or as many as exist.
    template <bool kWhole>
    __device__ __forceinline__ void store(const uint4 &values) const {
      if (kWhole || vectors_) {
        *reinterpret_cast<uint4 *>(y_) = values;
        return;
      }
      const uint32_t words[] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto bits = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
        if (i < elements_) reinterpret_cast<uint16_t *>(y_)[i] = bits;
      }
    }
    __device__ __forceinline__ void advance() { y_ += kHalfM * stride_; }

   private:
    T *y_;
    const int64_t stride_;
    int elements_;
    bool vectors_;
  };

  // Stores `count` rows of x. With `kWhole`, stores all of them, as whole rows of y with vectors.
  template <bool kWhole, class Scheduler>
  __device__ __forceinline__ void store_tile(const Scheduler &scheduler, const WorkTile &work,
                                             const Limits &limits, int count,
                                             const typename Tile::Accumulators &all) {
    const Bias bias(scheduler, args_.matmul, work.n + lane_row<Layout>(), limits.n);
    Output y(scheduler, args_, work.n, limits.n, work.m);
#pragma unroll
    for (int m = 0; m < Tile::kTileM; m += kSubtileM) {
      if (!kWhole && m >= count) return;
      float sums[kSubtileM / 2];
#pragma unroll
      for (int i = 0; i < kSubtileM / 2; ++i)
        sums[i] = m / 2 + i < Tile::kTileM / 2 ? all[m / 2 + i] : 0.0f;
      store_subtile<kWhole>(scheduler, work.m + m, count - m, bias, sums, y);
    }
  }

  // Each CTA stores its share of the cluster's tile.
  template <class Scheduler>
  __device__ __forceinline__ void store_cluster(const Scheduler &scheduler, const WorkTile &work,
                                                const Limits &limits,
                                                const typename Tile::Accumulators &all) {
    const ClusterReduction<Tile> reduction(shared_, args_.cluster_size);
    reduction.exchange(all);
    const int first = reduction.first_column();
    const int count =
        static_cast<int>(min(int64_t{reduction.columns()} * 8, limits.m - work.m - first * 8));
    const Bias bias(scheduler, args_.matmul, work.n + lane_row<Layout>(), limits.n);
    Output y(scheduler, args_, work.n, limits.n, work.m + first * 8);
    for (int column = 0; column < reduction.columns(); column += kSubtileM / 8) {
      reduction.wait(column);
      float sums[kSubtileM / 2] = {};
      reduction.template reduce<kSubtileM / 8>(column, sums);
      store_subtile<false>(scheduler, work.m + (first + column) * 8, count - column * 8, bias, sums,
                           y);
    }
  }

  // Each CTA stores its slice of the tile; the last CTA also stores the slices of CTAs that have
  // ended.
  template <class Scheduler>
  __device__ __forceinline__ void store_split(const Scheduler &scheduler, const WorkTile &work,
                                              const Limits &limits,
                                              const typename Tile::Accumulators &all) {
    using Reduction = SplitKReduction<Tile>;
    const int count = static_cast<int>(min(limits.m - work.m, int64_t{Tile::kTileM}));
    const Reduction reduction(args_, shared_, (count + 7) / 8);
    uint32_t slices = reduction.exchange(all);
    const Bias bias(scheduler, args_.matmul, work.n + lane_row<Layout>(), limits.n);
#pragma unroll 1
    for (; slices != 0; slices &= slices - 1) {
      const int slice = __ffs(static_cast<int>(slices)) - 1, end = reduction.end_column(slice);
#pragma unroll 1
      for (int column = reduction.first_column(slice); column < end;
           column += Reduction::kColumns) {
        float sums[kSubtileM / 2] = {};
        reduction.reduce(slice, column, sums);
        Output y(scheduler, args_, work.n, limits.n, work.m + column * 8);
        store_subtile<false>(scheduler, work.m + column * 8,
                             min(Reduction::kColumns * 8, min(count, end * 8) - column * 8), bias,
                             sums, y);
      }
    }
    reduction.finish();
  }

  // Stores y of kStoreWarps warps' rows of the weight by kSubtileM rows of x from m on, of which
  // `count` exist. The halves take turns, so that one barrier per half is enough: all threads have
  // read the data that a thread overwrites before the barrier of the other half.
  template <bool kWhole, class Scheduler>
  __device__ __forceinline__ void store_subtile(const Scheduler &scheduler, int m, int count,
                                                const Bias &bias,
                                                const float (&sums)[kSubtileM / 2], Output &y) {
    if (count <= 0) return;
    const int thread = static_cast<int>(threadIdx.x % (32 * kStoreWarps));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = half * kHalfM, i = first + thread / kChunks;
      __syncwarp();  // lanes may have stored different numbers of elements
      if (first < count) pack_half(scheduler, half, m + first, bias, sums + first / 2);
      sync_subtile();
      if (i < count) y.template store<kWhole>(neighbours(i, thread % kChunks));
      y.advance();
    }
  }

  // Writes y of kHalfM rows of x from m on into the subtile.
  template <class Scheduler>
  __device__ __forceinline__ void pack_half(const Scheduler &scheduler, int half, int m,
                                            const Bias &bias, const float *sums) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float *const pair = sums + 2 * i;
      const int own = m + i / 2 * 8 + lane_index() % 4 * 2;
      packed[i] =
          pack_pair(T{}, __fmaf_rn(pair[0], unit_, bias.values[i % 2]) * scheduler.row_scale(own),
                    __fmaf_rn(pair[1], unit_, bias.values[i % 2]) * scheduler.row_scale(own + 1));
    }
    stmatrix_x4_trans(chunk(half * kHalfM + lane_index() / 16 * 8 + lane_index() % 8,
                            consumer_thread() / 32 % kStoreWarps * 2 + lane_index() / 8 % 2),
                      packed);
  }

  // A subtile has two chunks per row for each warp, each with 8 of its rows of the weight, which
  // are kRowDistance apart. The chunks of eight neighbours lie in different banks.
  __device__ __forceinline__ uint8_t *chunk(int m, int which) const {
    return shared_.subtile(consumer_thread() / 32 / kStoreWarps * kStoreWarps) +
           (m * kChunks + (which ^ m * kStoreWarps / 4 % kChunks)) * 16;
  }

  // Returns the which-th eight neighbours in y of row m.
  __device__ __forceinline__ uint4 neighbours(int m, int which) const {
    if constexpr (Layout::kWarpPairs) {
      // Two warps share 32 rows. A warp has words of two neighbours (a distance of 2), or of one in
      // each four and its neighbour.
      const auto at = [&](int of) {
        return reinterpret_cast<const uint32_t *>(chunk(m, which / 4 * 4 + of))[which % 4];
      };
      const uint4 words{at(0), at(1), at(2), at(3)};
      if constexpr (Layout::kRowDistance == 2) return words;
      return {__byte_perm(words.x, words.y, 0x5410), __byte_perm(words.z, words.w, 0x5410),
              __byte_perm(words.x, words.y, 0x7632), __byte_perm(words.z, words.w, 0x7632)};
    } else if constexpr (Layout::kRowDistance == 8) {
      return *reinterpret_cast<const uint4 *>(chunk(m, which));
    } else {
      // Even rows are in the first chunk, odd ones in the second.
      const uint2 even = reinterpret_cast<const uint2 *>(chunk(m, which / 2 * 2))[which % 2];
      const uint2 odd = reinterpret_cast<const uint2 *>(chunk(m, which / 2 * 2 + 1))[which % 2];
      return {__byte_perm(even.x, odd.x, 0x5410), __byte_perm(even.x, odd.x, 0x7632),
              __byte_perm(even.y, odd.y, 0x5410), __byte_perm(even.y, odd.y, 0x7632)};
    }
  }

  // Must come between stores to half of a subtile and loads from it.
  static __device__ __forceinline__ void sync_subtile() {
    if constexpr (kStoreWarps > 1)
      named_barrier_sync(kFirstBarrier + consumer_thread() / (32 * kStoreWarps), 32 * kStoreWarps);
    else
      __syncwarp();
  }

  const typename Tile::Args &args_;
  const SharedStorage<Tile> shared_;
  const float unit_;
};

}  // namespace
}  // namespace nf4::cuda
