// The mainloop of the multistage kernels: a warp multiplies 32 rows of the weight by all rows of x
// of a CTA tile.
//
// While the tensor cores multiply two k-steps, the lanes decode the next two. Everything is
// interleaved by hand, a piece after the products of each 8 rows of x, and there are no branches
// in between: both warps of a scheduler reach a K-tile's barrier together, and what is left to do
// there leaves the tensor cores idle.
#pragma once

#include <cstdint>

#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/multistage/scheduler.hpp"
#include "cuda/matmul/multistage/x_stage.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/schedule.cuh"

namespace nf4::cuda {
namespace {

// Weight has the copies, the scales and the decoding of a kind of weight. Its Looked holds what
// look_up() finds in a step, until decode() makes fragments of it.
template <class Weight, int TileM>
class MultistageMainloop {
 public:
  using Arch = typename Weight::Arch;
  using T = typename Weight::Element;
  using Args = typename Weight::Args;
  using Loader = typename Weight::Loader;
  using Scales = typename Weight::Scales;
  static constexpr bool kOnSums = Weight::kScaleOn == ScaleOn::kSums;
  static constexpr int kMTiles = TileM / 8;
  static constexpr int kXStageBytes = XLoader<Arch, TileM>::kBytes;
  static constexpr int kStages = multistage_stages(Weight::kKind, TileM, Arch::kTensorCores);
  static constexpr int kWeightStages = kStages - 1;  // if there are any
  static_assert(kStages >= 3);
  // Element [i / 2][m][i % 2 * 2 + j] is the sum of row 4g + i of the warp and row 8 m + 2t + j of
  // x.
  using Sums = float[2][kMTiles][4];

  __device__ __forceinline__ MultistageMainloop(const Args &args, uint8_t *shared, float factor)
      : args_(args),
        weight_(args, shared),
        tables_(shared),
        x_stages_(shared + multistage_table_bytes(Weight::kKind)),
        weight_stages_(x_stages_ + kStages * kXStageBytes),
        factor_(factor) {}

  // Multiplies `left` K-tiles from k_tile on, of the rows of the weight from first_n on.
  template <class RowsOfX>
  __device__ __forceinline__ void run(RowsOfX rows_of_x, int64_t first_n, int k_tile, int left,
                                      Sums &sums) {
    using X = XLoader<Arch, TileM, RowsOfX>;
    X x(rows_of_x);
    Loader weight(args_, first_n, k_tile);
    x.begin();
    weight.begin();
    copy_stages(0, 1, x, weight, left);
    Scales scales(args_, tables_, first_n, k_tile);
    copy_stages(1, kStages - 1, x, weight, left);
#pragma unroll
    for (auto &rows : sums)
#pragma unroll
      for (auto &tile : rows)
#pragma unroll
        for (float &sum : tile) sum = 0;
    scales.begin();
    scales.next(factor_);
    wait_copies<kStages - 2>();
    __syncthreads();
    typename Scales::OfTile of_tile;
    scales.share(of_tile);
    typename Weight::Words words;
    weight.load(words, weight_stages_, left > 1);
    uint32_t a[2][2][2][4];  // [half][k-step][rows 16 i][fragment]
    typename Weight::Looked looked;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      weight_.template look_up<0>(looked, words, of_tile, step);
      weight_.decode(a[0], looked, of_tile, step);
    }

    int x_stage = x_lane_offset();
    uint4 b[kAhead];
    load_first(b, x_stage);
    int stage = 0, load_stage = kStages - 1, weight_stage = 0;
#pragma unroll 1
    for (; left > 0; --left) {
      uint8_t *const x_to = x_stages_ + load_stage * kXStageBytes;
      load_stage = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      scales.next(factor_);
      float scale[4] = {};
      if constexpr (kOnSums)
#pragma unroll
        for (int i = 0; i < 4; ++i) scale[i] = Weight::factor(of_tile[i]);
      float accumulators[kOnSums ? 2 : 1][kOnSums ? kMTiles : 1][4] = {};
      auto &products = pick(accumulators, sums);
      multiply<0>(b, x_stage, x_stage ^ 16, a[0], products, words, of_tile, a[1], [](int) {});
      if constexpr (!Scales::kThroughSharedMemory) scales.share(of_tile);

      wait_copies<kStages - 3>();
      __syncthreads();  // the next K-tile is there, and the stage of x before this one is free
      // All warps have the words of this K-tile, so its stage is free, too.
      uint8_t *const weight_to = weight_stages_ + weight_stage * kMultistageWeightBytes;
      weight_stage = weight_stage + 1 == kWeightStages ? 0 : weight_stage + 1;
      weight.load(words, weight_stages_ + weight_stage * kMultistageWeightBytes, left > 2);
      if constexpr (Scales::kThroughSharedMemory) scales.share(of_tile);
      const bool more = left >= kStages + X::kHeld;
      const int x_half = x_stage ^ 16;
      x_stage = stage * kXStageBytes + x_lane_offset();
      multiply<1>(b, x_half, x_stage, a[1], products, words, of_tile, a[0],
                  [&](int piece) { copy(piece, x, weight, x_to, weight_to, more); });
      if constexpr (kOnSums) {
#pragma unroll
        for (int f = 0; f < 2; ++f)
#pragma unroll
          for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int j = 0; j < 4; ++j)
              sums[f][m][j] = __fmaf_rn(scale[f * 2 + j / 2], accumulators[f][m][j], sums[f][m][j]);
      }
    }
    wait_copies<0>();
    __syncthreads();  // before the stages are used anew
  }

 private:
  static constexpr int kSteps = 16;  // a lane decodes two k-steps in so many
  // Chunks of x in registers before they are multiplied.
  static constexpr int kAhead = kMTiles < 2 ? kMTiles : 2;
  static constexpr int kFence = 2;  // tiles of 8 rows of x
  // Pieces of a K-tile's copies.
  static constexpr int kPieces = XLoader<Arch, TileM>::kPieces + Loader::kPieces;

  template <class Accumulators>
  static __device__ __forceinline__ Sums &pick(Accumulators &accumulators, Sums &sums) {
    if constexpr (kOnSums)
      return accumulators;
    else
      return sums;
  }

  template <class X>
  static __device__ __forceinline__ void copy(int piece, X &x, Loader &weight, uint8_t *x_stage,
                                              uint8_t *weight_stage, bool more) {
    if (piece < Loader::kPieces)
      weight.copy(piece, weight_stage, more);
    else
      x.copy(piece - Loader::kPieces, x_stage, more);
    if (piece + 1 < kPieces) return;
    weight.advance();
    x.advance();
    if constexpr (Arch::kTensorCores) cp_async_commit();
  }
  // Starts to copy the first K-tiles of `left` to the stages from `first` on. It is a loop, since
  // the instructions are not in the cache yet.
  template <class X>
  __device__ __forceinline__ void copy_stages(int first, int end, X &x, Loader &weight,
                                              int left) const {
#pragma unroll 1
    for (int i = first; i < end; ++i)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        copy(piece, x, weight, x_stages_ + i * kXStageBytes,
             weight_stages_ + i * kMultistageWeightBytes, i + X::kHeld < left);
  }
  template <int Pending>
  static __device__ __forceinline__ void wait_copies() {
    if constexpr (Arch::kTensorCores) cp_async_wait<Pending>();
  }

  // Returns after the products of which 8 rows of x a step looks up. It decodes after the next
  // ones.
  static constexpr __device__ int look_up_at(int step) {
    constexpr int kPlaces = kMTiles > 2 ? kMTiles - 1 : 1;
    return step * kPlaces / kSteps;
  }

  // The chunk of row 8 m + lane / 4 of x, from an offset in the stages.
  __device__ __forceinline__ uint4 load(int x, int m) const {
    return *reinterpret_cast<const uint4 *>(x_stages_ + x + m * 8 * kMultistageXRowBytes);
  }
  __device__ __forceinline__ void load_first(uint4 (&b)[kAhead], int x) const {
#pragma unroll
    for (int m = 0; m < kAhead; ++m) b[m] = load(x, m);
  }

  // Multiplies two k-steps by x, whose first chunks are in b. Meanwhile loads the first chunks of
  // next_x, decodes the next two k-steps into next_a, and calls copy(piece).
  template <int Half, class Copy>
  __device__ __forceinline__ void multiply(uint4 (&b)[kAhead], int x, int next_x,
                                           const uint32_t (&a)[2][2][4], Sums &sums,
                                           const typename Weight::Words &words,
                                           const typename Scales::OfTile &of_tile,
                                           uint32_t (&next_a)[2][2][4], Copy copy) const {
    typename Weight::Looked looked;
#pragma unroll
    for (int first = 0; first < kMTiles; first += kAhead) {
      // A product that adds to the sums of another one comes as late as registers allow.
#pragma unroll
      for (int k_step = 0; k_step < 2; ++k_step)
#pragma unroll
        for (int part = 0; part < kMmaParts<Arch>; ++part)
#pragma unroll
          for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int f = 0; f < 2; ++f)
              mma_part<Arch>(T{}, part, sums[f][first + i], a[k_step][f],
                             k_step == 0 ? b[i].x : b[i].z, k_step == 0 ? b[i].y : b[i].w);
#pragma unroll
      for (int m = first; m < first + kAhead; ++m) {
        b[m % kAhead] =
            m + kAhead < kMTiles ? load(x, m + kAhead) : load(next_x, m + kAhead - kMTiles);
        // Bounds that the compiler knows at once keep the arrays in registers.
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (kMTiles > 1 && look_up_at(step) == m - 1)
            weight_.decode(next_a, looked, of_tile, step);
          if (look_up_at(step) == m)
            weight_.template look_up<1 - Half>(looked, words, of_tile, step);
          if (kMTiles == 1) weight_.decode(next_a, looked, of_tile, step);
        }
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
          if (piece * kMTiles / kPieces == m) copy(piece);
      }
      if (kMTiles >= 8 && first % kFence == kFence - kAhead) schedule_fence();
    }
  }

  const Args &args_;
  const Weight weight_;
  uint8_t *const tables_;
  uint8_t *const x_stages_;
  uint8_t *const weight_stages_;
  const float factor_;
};

}  // namespace
}  // namespace nf4::cuda
