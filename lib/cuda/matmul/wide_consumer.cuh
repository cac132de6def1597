// A thread of a warpgroup that multiplies: weights from bytes into registers, which are the A
// operand of wgmma; x is the B operand, in shared memory.
#pragma once

#include <cstdint>

#include "cuda/matmul/wide_walk.cuh"
#include "cuda/matmul/wide_weights.cuh"
#include "cuda/mma.cuh"
#include "cuda/wgmma.cuh"

namespace nf4::cuda {
namespace {

// Weights says how bytes and scales become weights (wide_weights.cuh). A tile's multiply and
// finish have the same Columns, which are the tile's or half of them.
template <class Weights, class Tile>
class WideConsumer {
 public:
  using T = typename Weights::Element;
  static constexpr int kThreads = 128 * Tile::kWarpgroups;

  __device__ __forceinline__ WideConsumer(const WideArgs &wide, WideShared<Tile> shared,
                                          float factor)
      : wide_(wide), shared_(shared), weights_(shared.base), factor_(factor) {
    const int swizzle = row() / 2 % 4;
#pragma unroll
    for (int piece = 0; piece < 4; ++piece)
      pieces_[piece] = row() * kSlabPitch + (piece ^ swizzle) * 16;
  }

  // The sums of a tile. While the tensor cores work on a step of 64 columns, the threads make
  // the weights of the next.
  template <int Columns>
  __device__ __forceinline__ void multiply(const WidePlace &place) {
#pragma unroll
    for (float &sum : sums_) sum = 0;
    held_ = kNone;
    start_slab();
#pragma unroll 1
    for (int left = place.end_slab - place.first_slab; left > 0; --left) {
      step<0, Columns>(left > 1);
      step<1, Columns>(left > 1);
    }
    wgmma_wait<0>();
    release_x();
  }

  // Writes the tile's y.
  template <int Columns>
  __device__ __forceinline__ void finish(const WidePlace &place) {
    if (Columns == Tile::kColumns && wide_.splits > 1) return finish_together(place);
    const int count = static_cast<int>(min(wide_.matmul.m - place.of_x, int64_t{Columns}));
    const Bias bias(wide_.matmul, place.row + row());
#pragma unroll
    for (int column = 0; column < Columns; column += kPieceColumns) {
      float sums[kPieceColumns / 2];
#pragma unroll
      for (int i = 0; i < kPieceColumns / 2; ++i)
        sums[i] = column / 2 + i < Columns / 2 ? sums_[column / 2 + i] : 0.0f;
      store_piece(place.row + row(), place.of_x + column, count - column, bias, sums);
    }
  }

 private:
  static constexpr int kSlabPitch = kSlabColumns / 2;
  static constexpr int kNone = -1;
  static constexpr int kPieceColumns = WideLayout<Tile>::kPieceBytes / 32;

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x) - 128; }
  // The first of this lane's two rows of the tile, which are 8 apart.
  static __device__ __forceinline__ int row() { return thread() / 32 * 16 + lane() / 4; }

  // ---- Steps ----

  __device__ __forceinline__ void start_slab() {
    wait_for_phase(shared_.barrier(kSlabFull, slab_.slot), slab_.parity);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      scales_[half] = shared_.scales(slab_.slot)[row() + half * 8];
    load_words<0>();
  }

  // The bytes of a step of a slab: each row's 32, of which a lane uses every fourth.
  template <int Step>
  __device__ __forceinline__ void load_words() {
    const uint8_t *const slab = shared_.slab(slab_.slot);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int piece = 0; piece < 2; ++piece)
        words_[half][piece] = *reinterpret_cast<const uint4 *>(slab + half * 8 * kSlabPitch +
                                                               pieces_[Step * 2 + piece]);
  }

  template <int Step>
  __device__ __forceinline__ void decode() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const typename Weights::Scale scale(Step == 0 ? scales_[half].x : scales_[half].y);
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const uint4 words = words_[half][piece];
        uint32_t (&first)[4] = a_[Step][piece * 2];
        uint32_t (&second)[4] = a_[Step][piece * 2 + 1];
        first[half] = weights_(words.x, scale);
        first[half + 2] = weights_(words.y, scale);
        second[half] = weights_(words.z, scale);
        second[half + 2] = weights_(words.w, scale);
      }
    }
  }

  // The bytes of the next step are on their way before the products start, whose issue takes
  // long.
  template <int Step, int Columns>
  __device__ __forceinline__ void step(bool more) {
    decode<Step>();
    if constexpr (Step == 1) {
      __syncwarp();
      if (lane() == 0) arrive(shared_.barrier(kSlabEmpty, slab_.slot));
      slab_.advance();
      if (more) start_slab();
    } else {
      load_words<1>();
    }
    wait_for_phase(shared_.barrier(kXFull, x_.slot), x_.parity);
    wgmma_fence();
    const uint64_t x = wgmma_descriptor(shared_.x(x_.slot));
#pragma unroll
    for (int k = 0; k < 4; ++k)
      Wgmma<Columns>::add(T{}, reinterpret_cast<float (&)[Columns / 2]>(sums_), a_[Step][k],
                          x + 2 * k);
    wgmma_commit();
    wgmma_wait<1>();
    if (held_ != kNone) release_x();
    held_ = x_.slot;
    x_.advance();
  }

  __device__ __forceinline__ void release_x() {
    if (lane() == 0) arrive(shared_.barrier(kXEmpty, held_));
  }

  // ---- Results ----

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
    uint8_t *const piece =
        shared_.base + WideLayout<Tile>::kPieces + thread() / 32 * WideLayout<Tile>::kPieceBytes;
    // Rows of 32 bytes, whose halves change places every four rows.
    const auto half_row = [&](int m, int half) { return piece + m * 32 + (half ^ m / 4 % 2) * 16; };
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kPieceColumns / 16; ++part) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        packed[i] = pack_pair(T{}, __fmaf_rn(sums[part * 8 + 2 * i], factor_, bias.of[i % 2]),
                              __fmaf_rn(sums[part * 8 + 2 * i + 1], factor_, bias.of[i % 2]));
      store_transposed(half_row(part * 16 + lane() / 16 * 8 + lane() % 8, lane() / 8 % 2), packed);
    }
    __syncwarp();
    const int first = row - lane() / 4 + lane() % 2 * 8;
#pragma unroll
    for (int part = 0; part < kPieceColumns / 16; ++part) {
      const int m = part * 16 + lane() / 2;
      const uint4 values = *reinterpret_cast<const uint4 *>(half_row(m, lane() % 2));
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

  // Each block of the cluster gets an equal share of the tile's columns from all of them and
  // adds them in the order of the blocks.
  __device__ __forceinline__ void finish_together(const WidePlace &place) {
    constexpr int kColumnBlocks = Tile::kColumns / 8;
    const int share = (kColumnBlocks + wide_.splits - 1) / wide_.splits;
    const int rank = static_cast<int>(cluster_rank());
    const auto offset = [&](int source, int column_block) {
      return ((source * share + column_block) * kThreads + thread()) * 16;
    };
    meet_cluster();  // nobody reads the rings any more
#pragma unroll
    for (int column = 0; column < kColumnBlocks; ++column) {
      const int owner = column / share;
      const float *const sums = sums_ + column * 4;
      store_in_cluster(
          address_in_cluster(shared_.base, owner) + offset(rank, column - owner * share),
          {sums[0], sums[1], sums[2], sums[3]});
    }
    synchronize_cluster();
    const int first = rank * share;
    const int count = static_cast<int>(min(min(int64_t{share}, int64_t{kColumnBlocks - first}) * 8,
                                           wide_.matmul.m - place.of_x - first * 8));
    const Bias bias(wide_.matmul, place.row + row());
    for (int column = 0; column * 8 < count; column += kPieceColumns / 8) {
      float sums[kPieceColumns / 2] = {};
      for (int source = 0; source < wide_.splits; ++source)
#pragma unroll
        for (int i = 0; i < kPieceColumns / 8; ++i)
          if (column + i < share) add_partial(sums, i, offset(source, column + i));
      store_piece(place.row + row(), place.of_x + (first + column) * 8, count - column * 8, bias,
                  sums);
    }
  }

  __device__ __forceinline__ void add_partial(float (&sums)[kPieceColumns / 2], int column,
                                              int offset) {
    const float4 partial = *reinterpret_cast<const float4 *>(shared_.base + offset);
    sums[column * 4] += partial.x;
    sums[column * 4 + 1] += partial.y;
    sums[column * 4 + 2] += partial.z;
    sums[column * 4 + 3] += partial.w;
  }

  const WideArgs &wide_;
  const WideShared<Tile> shared_;
  const Weights weights_;
  const float factor_;
  int pieces_[4];  // of a row of a slab, from the slab on
  XTurn<Tile> x_;
  SlabTurn<Tile> slab_;
  int held_;  // the slot of x that products under way read
  float sums_[Tile::kColumns / 2];
  uint32_t a_[2][4][4];  // of two steps, of each the A operands of its four products
  uint4 words_[2][2];    // [row][piece]
  uint2 scales_[2];      // of two rows, of a slab's steps
};

}  // namespace
}  // namespace nf4::cuda
