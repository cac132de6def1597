// The mainloop of a consumer thread for integer weights, CTA tiles of up to 64 rows of x and groups
// of whole K-tiles. It differs from mainloop_scaled_sums.cuh in that a scale belongs to a K-tile.
// The tensor cores therefore go from the first step of a K-tile to the second without a wait, and
// sums are scaled half as often.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/consumer.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace nf4::cuda {
namespace {

template <class Decode, class Tile>
class MainloopGroupSums {
 public:
  __device__ __forceinline__ explicit MainloopGroupSums(SharedStorage<Tile> shared)
      : decode_(shared.base), weight_(shared), x_(shared) {}

  // Calls visit() after the sums of its first `rows` rows of x or more.
  template <class Visit>
  __device__ __forceinline__ void run(const WorkTile &work, int rows, Visit visit) {
    run(work, rows);
    visit();
  }
  // Computes the sums of a work tile, for all its rows of x.
  __device__ __forceinline__ void run(const WorkTile &work, int = Tile::kTileM) {
#pragma unroll
    for (float &sum : sums_) sum = 0;
    begin_k_tile();
#pragma unroll 1
    for (int left = work.k_tile_end - work.k_tile; left > 0; --left) k_tile(left > 1);
  }

  __device__ __forceinline__ typename Tile::Accumulators &sums() { return sums_; }

 private:
  using T = typename Decode::Element;
  using Scales = typename WeightReader<Tile>::Scales;

  __device__ __forceinline__ void begin_k_tile() {
    weight_.wait();
    scales_ = weight_.template scales<0>();
    weight_.decode(a_[0], decode_, scales_);
    weight_.template load_words<1>();
  }

  // While the tensor cores work on a step, the threads decode the next one.
  __device__ __forceinline__ void k_tile(bool more) {
    const Scales scales = scales_;
    issue<false>(a_[0]);
    x_.hold();
    weight_.decode(a_[1], decode_, scales);
    weight_.release();
    issue<true>(a_[1]);
    wgmma_wait<1>();
    x_.hold();
    if (more) begin_k_tile();
    wgmma_wait<0>();
    wgmma_fence_operand(accumulators_);
    x_.release_held();
    const float of[] = {Tile::Kind::sum_scale(scales.of[0]), Tile::Kind::sum_scale(scales.of[1])};
#pragma unroll
    for (int i = 0; i < Tile::kTileM / 2; ++i)
      sums_[i] = __fmaf_rn(of[i % 4 / 2], accumulators_[i], sums_[i]);
  }

  template <bool Accumulate>
  __device__ __forceinline__ void issue(const uint32_t (&a)[4][4]) {
    using Mma = Wgmma<Tile::kTileM>;
    const uint64_t x = x_.wait();
    wgmma_fence();
    Mma::template rs<Accumulate>(T{}, accumulators_, a[0], x);
#pragma unroll
    for (int k = 1; k < 4; ++k) Mma::template rs<true>(T{}, accumulators_, a[k], x + 2 * k);
    wgmma_commit();
  }

  const Decode decode_;
  WeightReader<Tile> weight_;
  XReader<Tile> x_;
  Scales scales_;
  typename Tile::Accumulators sums_;
  typename Tile::Accumulators accumulators_;  // sums of a K-tile
  uint32_t a_[2][4][4];                       // its steps: the A operands of four wgmmas each
};

}  // namespace
}  // namespace nf4::cuda
