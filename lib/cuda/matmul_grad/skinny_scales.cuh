// The scales of a K-tile of a strip: each of the warps that are side by side finishes a quarter of
// its rows.
#pragma once

#include "cuda/matmul_grad/skinny_mainloop.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

// A lane has one row, in two of the strip's four columns of blocks.
template <class Scales>
class GradScales {
  static constexpr int kRows = kStripK / kGradWarpsN;  // per warp
  static_assert(kRows * kGradWarpsN == 32 * 2);

 public:
  __device__ __forceinline__ GradScales(const WeightView &weight, int strip, int n_warp,
                                        int k_tile) {
    const int row = n_warp * kRows + static_cast<int>(threadIdx.x % 32 / 2);
    const int column = strip * kGradWarpsN + threadIdx.x % 2 * 2;
    const int row_blocks = static_cast<int>(weight.cols) / kGradBlocksize;
    block_ = (k_tile * kStripK + row) * row_blocks + column;
    last_ = static_cast<int>(weight.rows - 1) * row_blocks + column;
    to_ = threadIdx.x % 2 * 2 * kStripK + grad_scale_index(row);
  }

  // Prefetches the first scales into L2, which is allowed while the predecessor still writes.
  __device__ __forceinline__ void prefetch(const WeightView &weight) const {
    Scales::prefetch(weight, min(block_, last_));
  }

  // Fetches the scales of the K-tile after the one that was fetched last. Past the last row they
  // are those of the last row, which multiply zeros.
  __device__ __forceinline__ typename Scales::Pair fetch_next(const WeightView &weight) {
    typename Scales::Pair pair;
    pair.template fetch<LoadGlobal>(weight, min(block_, last_));
    block_ += static_cast<int>(weight.cols) * (kStripK / kGradBlocksize);
    return pair;
  }

  // Stores them to a stage.
  template <class Table>
  __device__ __forceinline__ void store(const typename Scales::Pair &pair, const Table &table,
                                        float *stage) const {
    const float2 scales = pair.finish(table);
    stage[to_] = scales.x;
    stage[to_ + kStripK] = scales.y;
  }

 private:
  int block_;  // the first of two
  int last_;
  int to_;  // in a stage
};

}  // namespace
}  // namespace nf4::cuda
