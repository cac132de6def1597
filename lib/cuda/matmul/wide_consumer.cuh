// A thread of a warpgroup that multiplies: weights from bytes into registers, which are the A
// operand of wgmma; x is the B operand, in shared memory.
#pragma once

#include <cstdint>

#include "cuda/matmul/wide_walk.cuh"
#include "cuda/matmul/wide_weights.cuh"
#include "cuda/wgmma.cuh"

namespace nf4::cuda {
namespace {

template <class T, class Tile>
class WideConsumer {
 public:
  static constexpr int kThreads = 128 * Tile::kWarpgroups;

  __device__ __forceinline__ WideConsumer(const WideArgs &wide, WideShared<Tile> shared)
      : wide_(wide),
        shared_(shared),
        pairs_(shared.base),
        factor_(WideWeights<T>::sum_factor(table_factor<T>(wide.matmul))),
        x_empty_(address_in_cluster(shared.barrier(kXEmpty, 0), min(lane(), wide.pair - 1))) {
    const int swizzle = row(0) / 2 % 4;
#pragma unroll
    for (int piece = 0; piece < 4; ++piece)
      pieces_[piece] = row(0) * kSlabPitch + (piece ^ swizzle) * 16;
  }

  // The sums of a tile. While the tensor cores work on a unit, which is one step of 64 rows, the
  // threads make the weights of the next.
  __device__ __forceinline__ void multiply(const WidePlace &place) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < Tile::kColumns / 2; ++i) sums_[block][i] = 0;
    held_ = kNone;
    start_slab();
#pragma unroll 1
    for (int left = place.end_slab - place.first_slab; left > 0; --left) {
      unit<0>(left > 1);
      unit<1>(left > 1);
      if constexpr (kUnits == 4) {
        unit<2>(left > 1);
        unit<3>(left > 1);
      }
    }
    wgmma_wait<0>();
    release_x();
  }

  // Writes the tile's y.
  __device__ __forceinline__ void finish(const WidePlace &place) {
    if (wide_.splits > 1) return finish_together(place);
    const int count = min(static_cast<int>(min(wide_.matmul.m - place.of_x, int64_t{INT32_MAX})),
                          Tile::kColumns);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const Bias bias(wide_.matmul, place.row + row(block));
#pragma unroll
      for (int column = 0; column < Tile::kColumns; column += 16) {
        float sums[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sums[i] = column / 2 + i < Tile::kColumns / 2 ? sums_[block][column / 2 + i] : 0.0f;
        store_piece(place.row + row(block), place.of_x + column, count - column, bias, sums);
      }
    }
  }

 private:
  static constexpr int kBlocks = Tile::kRowBlocks;
  static constexpr int kUnits = 2 * kBlocks;
  static constexpr int kSlabPitch = kSlabColumns / 2;
  static constexpr int kNone = -1;

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x) - 128; }
  // The first of this lane's two rows of the tile, which are 8 apart.
  static __device__ __forceinline__ int row(int block) {
    return (thread() / 128 * kBlocks + block) * 64 + thread() / 32 % 4 * 16 + lane() / 4;
  }

  // ---- Steps ----

  __device__ __forceinline__ void start_slab() {
    wait_for_phase(shared_.barrier(kSlabFull, slab_.slot), slab_.parity);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        scales_[block][half] = shared_.scales(slab_.slot)[row(block) + half * 8];
    load_words<0>();
  }

  // The bytes of a unit: each row's 32 of the step, of which a lane uses every fourth.
  template <int Unit>
  __device__ __forceinline__ void load_words() {
    constexpr int kStep = Unit / kBlocks, kBlock = Unit % kBlocks;
    const uint8_t *const slab = shared_.slab(slab_.slot) + kBlock * 64 * kSlabPitch;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int piece = 0; piece < 2; ++piece)
        words_[half][piece] = *reinterpret_cast<const uint4 *>(slab + half * 8 * kSlabPitch +
                                                               pieces_[kStep * 2 + piece]);
  }

  template <int Unit>
  __device__ __forceinline__ void decode() {
    constexpr int kStep = Unit / kBlocks, kBlock = Unit % kBlocks;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 both = scales_[kBlock][half];
      const typename WideWeights<T>::Scale scale(kStep == 0 ? both.x : both.y);
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const uint4 words = words_[half][piece];
        uint32_t(&first)[4] = a_[Unit % 2][piece * 2];
        uint32_t(&second)[4] = a_[Unit % 2][piece * 2 + 1];
        first[half] = scale.times(pairs_(words.x));
        first[half + 2] = scale.times(pairs_(words.y));
        second[half] = scale.times(pairs_(words.z));
        second[half + 2] = scale.times(pairs_(words.w));
      }
    }
  }

  template <int Unit>
  __device__ __forceinline__ void unit(bool more) {
    constexpr int kBlock = Unit % kBlocks;
    decode<Unit>();
    if constexpr (kBlock == 0) wait_for_phase(shared_.barrier(kXFull, x_.slot), x_.parity);
    wgmma_fence();
    const uint64_t x = wgmma_descriptor(shared_.x(x_.slot));
#pragma unroll
    for (int k = 0; k < 4; ++k)
      Wgmma<Tile::kColumns>::add(T{}, sums_[kBlock], a_[Unit % 2][k], x + 2 * k);
    wgmma_commit();
    if constexpr (Unit == kUnits - 1) {
      __syncwarp();
      if (lane() == 0) arrive(shared_.barrier(kSlabEmpty, slab_.slot));
      slab_.advance();
      if (more) start_slab();
    } else {
      load_words<Unit + 1>();
    }
    wgmma_wait<1>();
    if constexpr (kBlock == 0) {
      if (held_ != kNone) release_x();
    }
    if constexpr (kBlock == kBlocks - 1) {
      held_ = x_.slot;
      x_.advance();
    }
  }

  __device__ __forceinline__ void release_x() {
    if (lane() < wide_.pair) arrive_in_cluster(x_empty_ + held_ * 8);
  }

  // ---- Results ----

  struct Bias {
    float of[2];
    __device__ __forceinline__ Bias(const MatmulArgs &args, int row) {
      const T *bias = static_cast<const T *>(args.bias);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of[half] = bias != nullptr && row + half * 8 < args.rows ? to_float(bias[row + half * 8])
                                                                  : 0.0f;
    }
  };

  // y of 16 rows of the weight, this lane's being `row` and that after 8, by 16 of x of which
  // `count` exist.
  __device__ __forceinline__ void store_piece(int row, int of_x, int count, const Bias &bias,
                                              const float (&sums)[8]) {
    if (count <= 0) return;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      packed[i] = pack_pair(T{}, __fmaf_rn(sums[2 * i], factor_, bias.of[i % 2]),
                            __fmaf_rn(sums[2 * i + 1], factor_, bias.of[i % 2]));
    uint8_t *const piece = shared_.base + WideLayout<Tile>::kPieces +
                           thread() / 32 * WideLayout<Tile>::kPieceBytes;
    // Rows of 32 bytes, whose halves change places every four rows.
    const auto half_row = [&](int m, int half) { return piece + m * 32 + (half ^ m / 4 % 2) * 16; };
    __syncwarp();
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(half_row(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2))),
                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                 : "memory");
    __syncwarp();
    const int m = lane() / 2;
    const uint4 values = *reinterpret_cast<const uint4 *>(half_row(m, lane() % 2));
    if (m < count) store_row(row - lane() / 4 + lane() % 2 * 8, of_x + m, values);
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

  // Each block of the cluster gets an equal share of the tile's columns from all of them and
  // adds them in the order of the blocks.
  __device__ __forceinline__ void finish_together(const WidePlace &place) {
    constexpr int kColumnBlocks = Tile::kColumns / 8;
    const int share = (kColumnBlocks + wide_.splits - 1) / wide_.splits;
    const int rank = static_cast<int>(cluster_rank());
    const auto offset = [&](int source, int block, int column_block) {
      return (((source * kBlocks + block) * share + column_block) * kThreads + thread()) * 16;
    };
    synchronize_cluster();  // nobody reads the rings any more
#pragma unroll
    for (int column = 0; column < kColumnBlocks; ++column) {
      const int owner = column / share;
      const uint32_t to = address_in_cluster(shared_.base, owner);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float *const sums = sums_[block] + column * 4;
        store_in_cluster(to + offset(rank, block, column - owner * share),
                         {sums[0], sums[1], sums[2], sums[3]});
      }
    }
    synchronize_cluster();
    const int first = rank * share;
    const int count = static_cast<int>(
        min(min(int64_t{share}, int64_t{kColumnBlocks - first}) * 8,
            wide_.matmul.m - place.of_x - first * 8));
    for (int block = 0; block < kBlocks; ++block) {
      const Bias bias(wide_.matmul, place.row + row(block));
      for (int column = 0; column * 8 < count; column += 2) {
        float sums[8] = {};
        for (int source = 0; source < wide_.splits; ++source)
          add_partials(sums, offset(source, block, column), offset(source, block, column + 1),
                       column + 1 < share);
        store_piece(place.row + row(block), place.of_x + (first + column) * 8, count - column * 8,
                    bias, sums);
      }
    }
  }

  __device__ __forceinline__ void add_partials(float (&sums)[8], int first, int second, bool both) {
    const float4 a = *reinterpret_cast<const float4 *>(shared_.base + first);
    sums[0] += a.x, sums[1] += a.y, sums[2] += a.z, sums[3] += a.w;
    if (!both) return;
    const float4 b = *reinterpret_cast<const float4 *>(shared_.base + second);
    sums[4] += b.x, sums[5] += b.y, sums[6] += b.z, sums[7] += b.w;
  }

  const WideArgs &wide_;
  const WideShared<Tile> shared_;
  const QuadPairs pairs_;
  const float factor_;
  const uint32_t x_empty_;  // this lane's block of the pair's
  int pieces_[4];           // of a row of a slab, from the slab on
  XTurn<Tile> x_;
  SlabTurn<Tile> slab_;
  int held_;  // the slot of x that products under way read
  float sums_[kBlocks][Tile::kColumns / 2];
  uint32_t a_[2][4][4];  // of two units, of each the A operands of its four products
  uint4 words_[2][2];    // [row][piece]
  uint2 scales_[kBlocks][2];
};

}  // namespace
}  // namespace nf4::cuda
