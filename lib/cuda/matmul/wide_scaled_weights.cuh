// A thread of a warpgroup that multiplies, for many rows of x: weights times their scales from
// bytes into registers, which are the A operand of wgmma; x is the B operand, in shared memory.
#pragma once

#include <cstdint>

#include "cuda/matmul/wide_slabs.cuh"
#include "cuda/matmul/wide_weights.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace nf4::cuda {
namespace {

// Weights says how bytes and scales become weights (wide_weights.cuh).
template <class Weights, class Tile>
class WideScaledWeights {
 public:
  using T = typename Weights::Element;

  __device__ __forceinline__ explicit WideScaledWeights(WideShared<Tile> shared)
      : weights_(shared.base), slab_(shared), x_(shared) {}

  // The sums of a tile. While the tensor cores work on a step of 64 columns, the threads make the
  // weights of the next.
  __device__ __forceinline__ void multiply(const WidePlace &place) {
#pragma unroll
    for (float &sum : sums_) sum = 0;
    start_slab();
#pragma unroll 1
    for (int left = place.end_slab - place.first_slab; left > 0; --left) {
      step<0>(left > 1);
      step<1>(left > 1);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(sums_);
    x_.release_held();
  }

  __device__ __forceinline__ typename Tile::Sums &sums() { return sums_; }

 private:
  __device__ __forceinline__ void start_slab() {
    slab_.start();
    scales_[0] = slab_.template scales<0>();
    scales_[1] = slab_.template scales<1>();
  }

  // The bytes of the next step are on their way before the products start, whose issue takes
  // long.
  template <int Step>
  __device__ __forceinline__ void step(bool more) {
    const float2 scales = scales_[Step];
    slab_.decode(a_[Step], [&](uint32_t word, int half) {
      return weights_(word, half == 0 ? scales.x : scales.y);
    });
    if constexpr (Step == 0) {
      slab_.template load_words<1>();
    } else {
      slab_.release();
      if (more) start_slab();
    }
    const uint64_t x = x_.next();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) add_product(a_[Step][k], x + 2 * k);
    wgmma_commit();
    wgmma_wait<1>();
    x_.hold();
  }

  // A product has 256 columns at most.
  __device__ __forceinline__ void add_product(const uint32_t (&a)[4], uint64_t x) {
    constexpr int kParts = Tile::kColumns > 256 ? 2 : 1, kColumns = Tile::kColumns / kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      Wgmma<kColumns>::template rs<true>(
          T{}, reinterpret_cast<float (&)[kColumns / 2]>(sums_[part * kColumns / 2]), a,
          x + part * kColumns * kStepColumns * 2 / 16);
  }

  const Weights weights_;
  SlabReader<Tile> slab_;
  XReader<Tile> x_;
  float2 scales_[2];  // of the slab's steps, of this lane's two rows
  typename Tile::Sums sums_;
  uint32_t a_[2][4][4];  // of two steps, of each the A operands of its four products
};

}  // namespace
}  // namespace nf4::cuda
