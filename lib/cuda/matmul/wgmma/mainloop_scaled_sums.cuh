// The mainloop of a consumer thread for CTA tiles of up to 64 rows of x. A holds codebook entries.
// The accumulators of each step of 64 columns, which share a scale, are multiplied by that scale
// and added to the sums.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/consumer.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace nf4::cuda {
namespace {

template <class Decode, class Tile>
class MainloopScaledSums {
 public:
  __device__ __forceinline__ explicit MainloopScaledSums(SharedStorage<Tile> shared)
      : decode_(shared.base), weight_(shared), x_(shared) {}

  // Calls visit() after the sums of its first `rows` rows of x or more.
  template <class Visit>
  __device__ __forceinline__ void run(const WorkTile &work, int rows, Visit visit) {
    run(work, rows);
    visit();
  }
  // Computes the sums of a work tile, over the codebook's unit, for its first `rows` rows of x or
  // more.
  __device__ __forceinline__ void run(const WorkTile &work, int rows = Tile::kTileM) {
#pragma unroll
    for (float &sum : sums_) sum = 0;
    weight_.wait();
    if constexpr (kPipelined) {
      decode<0>(a_[0]);
      weight_.template load_words<1>();
    }
    if (kHalves && rows <= kPartM)
      multiply<true>(work);
    else
      multiply<false>(work);
  }

  // Adds the K-tiles of an adapter, after run(): its product over the sums' unit.
  __device__ __forceinline__ void add_lora(int k_tiles, int, float unit) {
#pragma unroll 1
    for (; k_tiles > 0; --k_tiles) {
      const uint64_t b = weight_.wait_lora(), product = x_.wait();
      const float factor = 1.0f / unit;
      multiply_lora<0>(b, product, factor);
      if constexpr (!kPipelined) multiply_lora<kPartM>(b, product, factor);
      weight_.release();
      x_.release();
    }
  }

  __device__ __forceinline__ typename Tile::Accumulators &sums() { return sums_; }

 private:
  using T = typename Decode::Element;
  using Scales = typename WeightReader<Tile>::Scales;

  // Registers hold A of two steps. With four warpgroups and 64 rows of x they do not, and wgmmas
  // are split into halves of the rows.
  static constexpr bool kHalves = !(Tile::kWarpgroups == 2 || Tile::kTileM < 64);
  static constexpr int kPartM = kHalves ? Tile::kTileM / 2 : Tile::kTileM;
  static constexpr bool kPipelined = !kHalves;

  template <bool Half>
  __device__ __forceinline__ void multiply(const WorkTile &work) {
#pragma unroll 1
    for (int left = work.k_tile_end - work.k_tile; left > 0; --left)
      if constexpr (kPipelined)
        step_pipelined(left > 1);
      else
        step_split<Half>(left > 1);
  }

  // Processes a K-tile. While the tensor cores work on a step, the threads decode the next one.
  __device__ __forceinline__ void step_pipelined(bool more) {
    issue<0>(a_[0], x_.wait());
    const Scales first = weight_.template scales<0>(), second = weight_.template scales<1>();
    decode<1>(a_[1]);
    weight_.release();
    if (more) weight_.wait();
    wait();
    x_.release();
    add_scaled<0>(first);

    issue<0>(a_[1], x_.wait());
    if (more) {
      decode<0>(a_[0]);
      weight_.template load_words<1>();
    }
    wait();
    x_.release();
    add_scaled<0>(second);
  }

  // Processes a K-tile. While the tensor cores work for one warpgroup, the others decode.
  template <bool Half>
  __device__ __forceinline__ void step_split(bool more) {
    decode<0>(a_[0]);
    const Scales first = weight_.template scales<0>();
    weight_.template load_words<1>();
    multiply_step<Half>(first);

    decode<1>(a_[0]);
    const Scales second = weight_.template scales<1>();
    weight_.release();
    if (more) weight_.wait();
    multiply_step<Half>(second);
  }
  template <bool Half>
  __device__ __forceinline__ void multiply_step(const Scales &scales) {
    const uint64_t x = x_.wait();
    issue<0>(a_[0], x);
    wait();
    add_scaled<0>(scales);
    if constexpr (Half) return x_.release();
    issue<kPartM>(a_[0], x);
    wait();
    x_.release();
    add_scaled<kPartM>(scales);
  }

  // The A operands of the step whose words were loaded last.
  template <int Step>
  __device__ __forceinline__ void decode(uint32_t (&a)[4][4]) const {
    weight_.decode(a, decode_, weight_.template scales<Step>());
  }

  // The wgmmas of a step with kPartM rows of x from First on.
  template <int First>
  __device__ __forceinline__ void issue(const uint32_t (&a)[4][4], uint64_t x) {
    using Mma = Wgmma<kPartM>;
    constexpr int kOffset = First * kStepK * 2 / 16;
    wgmma_fence();
    Mma::template rs<false>(T{}, accumulators_, a[0], x + kOffset);
#pragma unroll
    for (int k = 1; k < 4; ++k)
      Mma::template rs<true>(T{}, accumulators_, a[k], x + kOffset + 2 * k);
    wgmma_commit();
  }
  template <int First>
  __device__ __forceinline__ void multiply_lora(uint64_t b, uint64_t product, float factor) {
    using Mma = Wgmma<kPartM>;
    product += First * kStepK * 2 / 16;
    wgmma_fence();
    Mma::template ss<false>(T{}, accumulators_, b, product);
#pragma unroll
    for (int k = 1; k < kLoraTileK / 16; ++k)
      Mma::template ss<true>(T{}, accumulators_, b + 2 * k, product + 2 * k);
    wgmma_commit();
    wait();
#pragma unroll
    for (int i = 0; i < kPartM / 2; ++i)
      sums_[First / 2 + i] = __fmaf_rn(factor, accumulators_[i], sums_[First / 2 + i]);
  }
  __device__ __forceinline__ void wait() {
    wgmma_wait<0>();
    wgmma_fence_operand(accumulators_);
  }

  template <int First>
  __device__ __forceinline__ void add_scaled(const Scales &scales) {
    const float of[] = {Tile::Kind::sum_scale(scales.of[0]), Tile::Kind::sum_scale(scales.of[1])};
#pragma unroll
    for (int i = 0; i < kPartM / 2; ++i) {
      float &sum = sums_[First / 2 + i];
      sum = __fmaf_rn(of[i % 4 / 2], accumulators_[i], sum);
    }
  }

  const Decode decode_;
  WeightReader<Tile> weight_;
  XReader<Tile> x_;
  typename Tile::Accumulators sums_;
  float accumulators_[kPartM / 2];        // sums of a step
  uint32_t a_[kPipelined ? 2 : 1][4][4];  // steps: the A operands of four wgmmas each
};

}  // namespace
}  // namespace nf4::cuda
