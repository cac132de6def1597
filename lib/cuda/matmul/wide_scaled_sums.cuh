// A thread of a warpgroup that multiplies, for tiles of up to 64 rows of x: entries of the
// codebook from bytes into registers, which are the A operand of wgmma, x as the B operand, and
// the sums of each step of 64 columns, which lie in one block of the weight, times its scale.
#pragma once

#include <cstdint>

#include "cuda/matmul/wide_slabs.cuh"
#include "cuda/matmul/wide_weights.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace nf4::cuda {
namespace {

template <class T, class Tile>
class WideScaledSums {
 public:
  __device__ __forceinline__ explicit WideScaledSums(WideShared<Tile> shared)
      : entries_(shared.base), slab_(shared), x_(shared) {}

  // The sums of a tile, over the codebook's unit.
  __device__ __forceinline__ void multiply(const WidePlace &place) {
#pragma unroll
    for (float &sum : sums_) sum = 0;
    slab_.start();
    if constexpr (kAhead) {
      decode(a_[0]);
      slab_.template load_words<1>();
    }
#pragma unroll 1
    for (int left = place.end_slab - place.first_slab; left > 0; --left)
      if constexpr (kAhead)
        multiply_ahead(left > 1);
      else
        multiply_in_turn(left > 1);
  }

  __device__ __forceinline__ typename Tile::Sums &sums() { return sums_; }

 private:
  // Registers hold operands of two steps, but where four warpgroups have sums of 64 columns, whose
  // products come by halves.
  static constexpr bool kAhead = Tile::kWarpgroups == 2 || Tile::kColumns < 64;
  static constexpr int kPart = kAhead ? Tile::kColumns : Tile::kColumns / 2;

  // A slab. While the tensor cores work on a step, the threads make the next one's operands.
  __device__ __forceinline__ void multiply_ahead(bool more) {
    start_products<0>(a_[0], x_.next());
    const float2 first = slab_.template scales<0>(), second = slab_.template scales<1>();
    decode(a_[1]);
    slab_.release();
    if (more) slab_.start();
    end_products();
    x_.done();
    add<0>(first);

    start_products<0>(a_[1], x_.next());
    if (more) {
      decode(a_[0]);
      slab_.template load_words<1>();
    }
    end_products();
    x_.done();
    add<0>(second);
  }

  // A slab. While the tensor cores work for one warpgroup, the others make their operands.
  __device__ __forceinline__ void multiply_in_turn(bool more) {
    decode(a_[0]);
    const float2 first = slab_.template scales<0>();
    slab_.template load_words<1>();
    multiply_step(first);

    decode(a_[0]);
    const float2 second = slab_.template scales<1>();
    slab_.release();
    if (more) slab_.start();
    multiply_step(second);
  }
  __device__ __forceinline__ void multiply_step(float2 scales) {
    const uint64_t x = x_.next();
    start_products<0>(a_[0], x);
    end_products();
    add<0>(scales);
    start_products<kPart>(a_[0], x);
    end_products();
    x_.done();
    add<kPart>(scales);
  }

  // The A operands of the step whose bytes were loaded last.
  __device__ __forceinline__ void decode(uint32_t (&a)[4][4]) const {
    slab_.decode(a, [&](uint32_t word, int) { return entries_(word); });
  }

  // The products of a step with kPart columns of the tile from First on.
  template <int First>
  __device__ __forceinline__ void start_products(const uint32_t (&a)[4][4], uint64_t x) {
    using Product = Wgmma<kPart>;
    constexpr int kOffset = First * kStepColumns * 2 / 16;
    wgmma_fence();
    Product::template rs<false>(T{}, products_, a[0], x + kOffset);
#pragma unroll
    for (int k = 1; k < 4; ++k)
      Product::template rs<true>(T{}, products_, a[k], x + kOffset + 2 * k);
    wgmma_commit();
  }
  __device__ __forceinline__ void end_products() {
    wgmma_wait<0>();
    wgmma_fence_operand(products_);
  }

  // The scales are those of this lane's two rows.
  template <int First>
  __device__ __forceinline__ void add(float2 scales) {
#pragma unroll
    for (int i = 0; i < kPart / 2; ++i) {
      float &sum = sums_[First / 2 + i];
      sum = __fmaf_rn(i % 4 < 2 ? scales.x : scales.y, products_[i], sum);
    }
  }

  const CodebookEntries<T> entries_;
  SlabReader<Tile> slab_;
  XReader<Tile> x_;
  typename Tile::Sums sums_;
  float products_[kPart / 2];         // of a step
  uint32_t a_[kAhead ? 2 : 1][4][4];  // of steps, of each the A operands of its four products
};

}  // namespace
}  // namespace nf4::cuda
