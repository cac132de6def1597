// The scales of a K-tile of a strip: the warps side by side finish a quarter of its rows each.
#pragma once

#include "cuda/matmul_grad/skinny_mainloop.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

// A lane has one row, in two of the strip's four columns of blocks.
template <class Scales>
class GradScales {
  static constexpr int kRows = kStripK / kGradWarpsN;  // of a warp
  static constexpr int kScales = 2;
  static_assert(kRows * kGradWarpsN == 32 * kScales);

 public:
  __device__ __forceinline__ GradScales(const WeightView &weight, int first_column, int n_warp)
      : row_(n_warp * kRows + static_cast<int>(threadIdx.x % 32 / 2)) {
#pragma unroll
    for (int i = 0; i < kScales; ++i)
      // Past the last column are those of the last block, for sums that are not stored.
      columns_[i] = min(first_column + kStripWarpRows * block_column(i),
                        static_cast<int>(weight.cols) - kStripWarpRows);
  }

  // Past the last row is that of the last, which multiplies zeros.
  __device__ __forceinline__ void fetch(const WeightView &weight, int k_tile) {
    const int64_t row = min(int64_t{k_tile} * kStripK + row_, weight.rows - 1);
#pragma unroll
    for (int i = 0; i < kScales; ++i)
      fetched_[i] = Scales::template fetch<LoadGlobal>(
          weight, (row * weight.cols + columns_[i]) >> weight.blocksize_log2);
  }

  // Those that were fetched, times `unit`, to a stage.
  template <class Table>
  __device__ __forceinline__ void store(const Table &table, float unit, float *stage) const {
#pragma unroll
    for (int i = 0; i < kScales; ++i)
      stage[block_column(i) * kStripK + grad_scale_index(row_)] =
          multiply_rn(Scales::finish(fetched_[i], table), unit);
  }

 private:
  static __device__ __forceinline__ int block_column(int i) {
    return static_cast<int>(threadIdx.x % 2) + i * 2;
  }

  int row_;  // of a K-tile
  int columns_[kScales];
  typename Scales::Fetched fetched_[kScales];
};

}  // namespace
}  // namespace nf4::cuda
