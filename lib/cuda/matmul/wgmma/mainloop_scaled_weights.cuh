// The mainloop of a consumer thread for CTA tiles of more than 64 rows of x, whose sums fill the
// registers: A holds weights times their scales, and wgmma accumulates over all columns.
#pragma once

#include <cstdint>

#include "cuda/matmul/wgmma/consumer.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace nf4::cuda {
namespace {

template <class Decode, class Tile>
class MainloopScaledWeights {
 public:
  static constexpr bool kHalves = false;

  __device__ __forceinline__ explicit MainloopScaledWeights(SharedStorage<Tile> shared)
      : decode_(shared.base), weight_(shared), x_(shared) {}

  // The sums of a work tile. While the tensor cores work on a step, the threads decode the next.
  __device__ __forceinline__ void run(const WorkTile &work) {
#pragma unroll
    for (float &sum : sums_) sum = 0;
    wait_weight();
#pragma unroll 1
    for (int left = work.k_tile_end - work.k_tile; left > 0; --left) {
      step<0>(left > 1);
      step<1>(left > 1);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(sums_);
    x_.release_held();
  }

  // Adds K-tiles of an adapter, of k_steps together, after run().
  __device__ __forceinline__ void add_lora(int k_tiles, int k_steps, float) {
#pragma unroll 1
    for (; k_tiles > 0; --k_tiles, k_steps -= 2) {
      const uint64_t b = weight_.wait_lora(), product = x_.wait();
      multiply_lora(b, product);
      if (k_steps > 1) multiply_lora(b + 2, product + 2);
      wgmma_wait<0>();
      wgmma_fence_operand(sums_);
      weight_.release();
      x_.release();
    }
  }

  __device__ __forceinline__ typename Tile::Accumulators &sums() { return sums_; }

 private:
  using T = typename Decode::Element;
  using Reader = typename Tile::Kind::template Reader<Tile>;

  __device__ __forceinline__ void wait_weight() {
    weight_.wait();
    scales_[0] = weight_.template scales<0>();
    scales_[1] = weight_.template scales<1>();
  }

  // The words of the next step are on their way before the wgmmas are issued, which takes long.
  template <int Step>
  __device__ __forceinline__ void step(bool more) {
    weight_.decode(a_[Step], decode_, scales_[Step]);
    if constexpr (Step == 0) {
      weight_.template load_words<1>();
    } else {
      weight_.release();
      if (more) wait_weight();
    }
    const uint64_t x = x_.wait();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_add(a_[Step][k], x + 2 * k);
    wgmma_commit();
    wgmma_wait<1>();
    x_.hold();
  }

  // 16 ranks.
  __device__ __forceinline__ void multiply_lora(uint64_t b, uint64_t product) {
    wgmma_fence();
    for_each_part([&](auto &sums, int offset) {
      Wgmma<kPartM>::template ss<true>(T{}, sums, b, product + offset);
    });
    wgmma_commit();
  }

  // A wgmma has 256 rows of x at most. Calls visit(sums, offset) for each: the offset in a
  // descriptor of x.
  static constexpr int kParts = Tile::kTileM > 256 ? 2 : 1, kPartM = Tile::kTileM / kParts;
  template <class Visit>
  __device__ __forceinline__ void for_each_part(Visit visit) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      visit(reinterpret_cast<float (&)[kPartM / 2]>(sums_[part * kPartM / 2]),
            part * kPartM * kStepK * 2 / 16);
  }
  __device__ __forceinline__ void multiply_add(const uint32_t (&a)[4], uint64_t x) {
    for_each_part([&](auto &sums, int offset) {
      Wgmma<kPartM>::template rs<true>(T{}, sums, a, x + offset);
    });
  }

  const Decode decode_;
  Reader weight_;
  XReader<Tile> x_;
  typename Reader::Scales scales_[2];  // of the K-tile's steps
  typename Tile::Accumulators sums_;
  uint32_t a_[2][4][4];  // of two steps, the A operands of four wgmmas each
};

}  // namespace
}  // namespace nf4::cuda
