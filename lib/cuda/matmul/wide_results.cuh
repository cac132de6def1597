// Writes the y of tiles.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "cuda/element.cuh"
#include "cuda/matmul/wide_slabs.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mma.cuh"
#include "problem.hpp"

namespace nf4::cuda {
namespace {

// A thread's part of it, from the sums that it has, over `unit`.
template <class T, class Tile>
class WideResults {
 public:
  static constexpr int kThreads = 128 * Tile::kWarpgroups;

  __device__ __forceinline__ WideResults(const WideArgs &wide, WideShared<Tile> shared, float unit)
      : wide_(wide), shared_(shared), unit_(unit) {}

  __device__ __forceinline__ void write(const WidePlace &place, typename Tile::Sums &all) {
    if constexpr (Tile::kStreamed) {
      if (!place.writes) return leave(all);
#pragma unroll 1
      for (int block = place.first_block; block < block_index(); ++block) take(block, all);
    } else if (wide_.splits > 1) {
      return write_together(place, all);
    }
    const int count = static_cast<int>(min(wide_.matmul.m - place.of_x, int64_t{Tile::kColumns}));
    const Bias bias(wide_.matmul, place.row + first_row());
#pragma unroll
    for (int column = 0; column < Tile::kColumns; column += kPieceColumns) {
      float sums[kPieceColumns / 2];
#pragma unroll
      for (int i = 0; i < kPieceColumns / 2; ++i)
        sums[i] = column / 2 + i < Tile::kColumns / 2 ? all[column / 2 + i] : 0.0f;
      store_piece(place.row + first_row(), place.of_x + column, count - column, bias, sums);
    }
  }

 private:
  static constexpr int kPieceColumns = WideLayout<Tile>::kPieceBytes / 32;
  static constexpr int kColumnBlocks = Tile::kColumns / 8;
  static constexpr uint32_t kAllLanes = 0xffffffff;

  struct Bias {
    float of[2];
    __device__ __forceinline__ Bias(const MatmulArgs &args, int row) {
      const T *bias = static_cast<const T *>(args.bias);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of[half] =
            bias != nullptr && row + half * 8 < args.rows ? to_float(bias[row + half * 8]) : 0.0f;
    }
  };

  // y of 16 rows of the weight, this lane's being `row` and that after 8, by kPieceColumns rows
  // of x of which `count` exist.
  __device__ __forceinline__ void store_piece(int row, int of_x, int count, const Bias &bias,
                                              const float (&sums)[kPieceColumns / 2]) {
    if (count <= 0) return;
    uint8_t *const piece = shared_.base + WideLayout<Tile>::kPieces +
                           multiplier_index() / 32 * WideLayout<Tile>::kPieceBytes;
    // Rows of 32 bytes, whose halves change places every four rows.
    const auto half_row = [&](int m, int half) { return piece + m * 32 + (half ^ m / 4 % 2) * 16; };
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kPieceColumns / 16; ++part) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        packed[i] = pack_pair(T{}, __fmaf_rn(sums[part * 8 + 2 * i], unit_, bias.of[i % 2]),
                              __fmaf_rn(sums[part * 8 + 2 * i + 1], unit_, bias.of[i % 2]));
      stmatrix_x4_trans(
          half_row(part * 16 + lane_index() / 16 * 8 + lane_index() % 8, lane_index() / 8 % 2),
          packed);
    }
    __syncwarp();
    const int first = row - lane_index() / 4 + lane_index() % 2 * 8;
#pragma unroll
    for (int part = 0; part < kPieceColumns / 16; ++part) {
      const int m = part * 16 + lane_index() / 2;
      const uint4 values = *reinterpret_cast<const uint4 *>(half_row(m, lane_index() % 2));
      if (m < count) store_row(first, of_x + m, values);
    }
  }

  // Eight neighbours in a row of y, as far as they exist.
  __device__ __forceinline__ void store_row(int row, int of_x, uint4 values) {
    const MatmulArgs &args = wide_.matmul;
    T *const y = static_cast<T *>(args.y) + of_x * args.y_stride + row;
    if (wide_.y_vectors && row + 8 <= args.rows) {
      *reinterpret_cast<uint4 *>(y) = values;
      return;
    }
    const uint32_t words[] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto bits = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
      if (row + i < args.rows) reinterpret_cast<uint16_t *>(y)[i] = bits;
    }
  }

  static __device__ __forceinline__ int block_index() { return static_cast<int>(blockIdx.x); }

  // ---- Streamed tiles ----

  using Flag = ::cuda::atomic_ref<uint64_t, ::cuda::thread_scope_device>;

  __device__ __forceinline__ Flag flag(int block) const {
    return Flag(wide_.flags[block * MatmulWorkspace::kFlags + multiplier_index() / 32]);
  }

  // What a block leaves of 8 columns to this thread's namesake: where it is.
  __device__ __forceinline__ float4 *partials(int block, int column_block) const {
    return wide_.partials + (block * kColumnBlocks + column_block) * kThreads + multiplier_index();
  }

  // Leaves the sums to the block that writes y.
  __device__ __forceinline__ void leave(const typename Tile::Sums &sums) const {
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i)
      __stcg(partials(block_index(), i),
             float4{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]});
    // In this order: a fence is for what its own thread has seen, which is all lanes' after the
    // warp has met.
    __syncwarp();
    __threadfence();
    if (lane_index() == 0) flag(block_index()).store(wide_.signature, ::cuda::memory_order_relaxed);
  }

  // Adds what a block left. The flag is as good as new for the next launch with these arguments.
  __device__ __forceinline__ void take(int block, typename Tile::Sums &sums) const {
    // All lanes look, so that the compiler sees that they stay together.
    while (__any_sync(kAllLanes, flag(block).load(::cuda::memory_order_acquire) != wide_.signature))
      continue;
    if (lane_index() == 0) flag(block).store(0, ::cuda::memory_order_relaxed);
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i) {
      const float4 partial = __ldcg(partials(block, i));
      sums[4 * i] += partial.x;
      sums[4 * i + 1] += partial.y;
      sums[4 * i + 2] += partial.z;
      sums[4 * i + 3] += partial.w;
    }
  }

  // ---- Clusters ----

  // Each block of the cluster gets an equal share of the tile's columns from all of them and
  // adds them in the order of the blocks.
  __device__ __forceinline__ void write_together(const WidePlace &place,
                                                 const typename Tile::Sums &all) {
    const int share = (kColumnBlocks + wide_.splits - 1) / wide_.splits;
    const int rank = static_cast<int>(cluster_rank());
    const auto offset = [&](int source, int column_block) {
      return ((source * share + column_block) * kThreads + multiplier_index()) * 16;
    };
    cluster_sync_relaxed();  // nobody reads the rings any more
#pragma unroll
    for (int column = 0; column < kColumnBlocks; ++column) {
      const int owner = column / share;
      const float *const sums = all + column * 4;
      store_shared_cluster(
          map_shared_rank(shared_.base, owner) + offset(rank, column - owner * share),
          {sums[0], sums[1], sums[2], sums[3]});
    }
    cluster_sync();
    const int first = rank * share, own = min(share, kColumnBlocks - first);
    const int count =
        static_cast<int>(min(int64_t{own} * 8, wide_.matmul.m - place.of_x - first * 8));
    const Bias bias(wide_.matmul, place.row + first_row());
    for (int column = 0; column * 8 < count; column += kPieceColumns / 8) {
      float sums[kPieceColumns / 2] = {};
      for (int source = 0; source < wide_.splits; ++source)
#pragma unroll
        for (int i = 0; i < kPieceColumns / 8; ++i)
          if (column + i < own) add_partial(sums, i, offset(source, column + i));
      store_piece(place.row + first_row(), place.of_x + (first + column) * 8, count - column * 8,
                  bias, sums);
    }
  }

  __device__ __forceinline__ void add_partial(float (&sums)[kPieceColumns / 2], int column,
                                              int offset) const {
    const float4 partial = *reinterpret_cast<const float4 *>(shared_.base + offset);
    sums[column * 4] += partial.x;
    sums[column * 4 + 1] += partial.y;
    sums[column * 4 + 2] += partial.z;
    sums[column * 4 + 3] += partial.w;
  }

  const WideArgs &wide_;
  const WideShared<Tile> shared_;
  const float unit_;
};

}  // namespace
}  // namespace nf4::cuda
