// The mainloop of a consumer thread for CTA tiles of more than 64 rows of x, whose sums fill the
// registers. A holds weights times their scales, and wgmma accumulates over all columns.
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
  __device__ __forceinline__ explicit MainloopScaledWeights(SharedStorage<Tile> shared)
      : decode_(shared.base), weight_(shared), x_(shared) {}

  // Computes the sums of a work tile.
  __device__ __forceinline__ void run(const WorkTile &work) { multiply<Tile::kTileM>(work); }
  // Calls visit() after the sums of its first `rows` rows of x or more. There is a call in each
  // loop, so that no other loop's registers hold the same sums.
  template <class Visit>
  __device__ __forceinline__ void run(const WorkTile &work, int rows, Visit visit) {
    multiply_rows<0>(work, rows, visit);
  }

  // Adds the K-tiles of an adapter, in groups of k_steps, after run().
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
  // The number of steps whose A is in registers. With four warpgroups, the others decode while one
  // waits.
  static constexpr int kSteps = Tile::kWarpgroups == 4 ? 1 : 2;

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (float &sum : sums_) sum = 0;
    wait_weight();
  }

  // Uses the narrowest wgmmas that have at least `rows` rows of x.
  template <int Index, class Visit>
  __device__ __forceinline__ void multiply_rows(const WorkTile &work, int rows, Visit visit) {
    constexpr int kRows = Tile::kFewerRows.of[Index];
    if constexpr (kRows == 0) {
      multiply<Tile::kTileM>(work);
      visit();
    } else if (rows <= kRows) {
      multiply<kRows>(work);
      visit();
    } else {
      multiply_rows<Index + 1>(work, rows, visit);
    }
  }
  // While the tensor cores work on a step, the threads decode the next one.
  template <int Rows>
  __device__ __forceinline__ void multiply(const WorkTile &work) {
    begin();
#pragma unroll 1
    for (int left = work.k_tile_end - work.k_tile; left > 0; --left) {
      step<0, Rows>(left > 1);
      step<1, Rows>(left > 1);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(sums_);
    x_.release_held();
  }

  __device__ __forceinline__ void wait_weight() {
    weight_.wait();
    scales_[0] = weight_.template scales<0>();
    scales_[1] = weight_.template scales<1>();
  }

  // The loads of the next step's words are in flight before the wgmmas are issued, which takes
  // long.
  template <int Step, int Rows>
  __device__ __forceinline__ void step(bool more) {
    auto &a = a_[Step % kSteps];
    weight_.decode(a, decode_, scales_[Step]);
    if constexpr (Step == 0) {
      weight_.template load_words<1>();
    } else {
      weight_.release();
      if (more) wait_weight();
    }
    const uint64_t x = x_.wait();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_add<Rows>(a[k], x + 2 * k);
    wgmma_commit();
    if constexpr (kSteps == 1) {
      wgmma_wait<0>();
      x_.release();
    } else {
      wgmma_wait<1>();
      x_.hold();
    }
  }

  // Multiplies 16 ranks.
  __device__ __forceinline__ void multiply_lora(uint64_t b, uint64_t product) {
    wgmma_fence();
    for_each_part<Tile::kTileM>([&](auto &sums, int offset, auto mma) {
      decltype(mma)::template ss<true>(T{}, sums, b, product + offset);
    });
    wgmma_commit();
  }

  // A wgmma has at most 256 rows of x. Calls visit(sums, offset, wgmma) for each wgmma, with its
  // offset in a descriptor of x.
  template <int Rows, class Visit>
  __device__ __forceinline__ void for_each_part(Visit visit) {
    constexpr int kPartM = Rows / Tile::kXBoxes;
#pragma unroll
    for (int part = 0; part < Tile::kXBoxes; ++part)
      visit(reinterpret_cast<float (&)[kPartM / 2]>(sums_[part * Tile::kPartM / 2]),
            part * Tile::kPartM * kStepK * 2 / 16, Wgmma<kPartM>{});
  }
  template <int Rows>
  __device__ __forceinline__ void multiply_add(const uint32_t (&a)[4], uint64_t x) {
    for_each_part<Rows>([&](auto &sums, int offset, auto mma) {
      decltype(mma)::template rs<true>(T{}, sums, a, x + offset);
    });
  }

  const Decode decode_;
  Reader weight_;
  XReader<Tile> x_;
  typename Reader::Scales scales_[2];  // for the K-tile's steps
  typename Tile::Accumulators sums_;
  uint32_t a_[kSteps][4][4];  // steps: the A operands of four wgmmas each
};

}  // namespace
}  // namespace nf4::cuda
