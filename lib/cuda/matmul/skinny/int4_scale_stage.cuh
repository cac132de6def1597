// The scales and zero points of a CTA's rows of an integer weight in shared memory, copied as they
// are stored.
#pragma once

#include "cuda/matmul/skinny/int4_layout.cuh"
#include "cuda/matmul/skinny/scale_stage.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class Layout>
class Int4ScaleStage {
 public:
  __device__ __forceinline__ Int4ScaleStage(const Int4SkinnyArgs &args, uint8_t *shared,
                                            int barrier)
      : args_(args), barrier_(shared + barrier), shared_(shared) {}

  __device__ __forceinline__ void init() const { barrier_.init(); }

  // Starts the copies for `rows` rows from first_row on, a multiple of kInt4Unit. In a stack of
  // experts they are those of one expert; args describe the first.
  __device__ __forceinline__ void load(int first_row, int rows, int64_t expert = 0) const {
    const int units = (rows + kInt4Unit - 1) / kInt4Unit;
    const int groups = static_cast<int>(args_.matmul.weight.groups);
    if constexpr (std::is_same_v<Layout, SkinnyRowPacked>) {
      // All of them lie side by side: for each group of a unit, a vector of scales and a word of
      // zero points.
      const int64_t first = (expert * args_.matmul.weight.rows + first_row) * groups;
#pragma unroll 1
      for (int i = threadIdx.x; i < units * groups; i += kSkinnyThreads)
        copy(first + i * 8, first / 8 + i, i, min(rows * groups - i * 8, 8));
    } else {
      const int pitch = args_.scale_pitch / kInt4Unit;
#pragma unroll 1
      for (int group = threadIdx.x / 32; group < groups; group += kSkinnyWarps) {
        const int64_t first = (expert * groups + group) * args_.matmul.weight.rows + first_row;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < units; i += 32)
          copy(first + i * 8, first / 8 + i, group * pitch + i, 8);
      }
    }
    barrier_.commit();
  }

  __device__ __forceinline__ void publish(bool one_later) const {
    barrier_.publish(one_later, true);
  }
  __device__ __forceinline__ void wait(uint32_t phase) const { barrier_.wait(phase); }

  // A reader for the lane's row `row` and for the row of fragment row group_id + 8, in a row of
  // tiles, and for quarter thread_in_group of a K-tile.
  __device__ __forceinline__ typename Layout::ScaleReader reader(int k_tile, int tile,
                                                                 int row) const {
    const Int4View &weight = args_.matmul.weight;
    // Past the last column any scale of the row may be used; another row's scale might be a NaN.
    const uint32_t column = min(k_tile * kWarpTileK + FragmentLane().thread_in_group * kScaleK,
                                static_cast<int>(weight.cols) - 1);
    const uint32_t group = column / static_cast<uint32_t>(weight.group_size);
    return {args_, shared_, static_cast<int>(group), tile, row};
  }

 private:
  // Copies `count` scales, at most 8, and a word of zero points.
  __device__ __forceinline__ void copy(int64_t scales, int64_t zeros, int to, int count) const {
    const Int4View &weight = args_.matmul.weight;
    auto *const to_scales = reinterpret_cast<uint16_t *>(shared_ + args_.smem_scales) + to * 8;
    if (count == 8)
      cp_async_16(to_scales, weight.scales + scales, 16);
    else
      for (int i = 0; i < count; ++i) to_scales[i] = weight.scales[scales + i];
    uint32_t *const to_zeros = reinterpret_cast<uint32_t *>(shared_ + args_.smem_zeros) + to;
    if (weight.zeros != nullptr)
      cp_async_4(to_zeros, weight.zeros + zeros);
    else
      *to_zeros = kInt4SymmetricZeros;
  }

  const Int4SkinnyArgs &args_;
  const ScaleBarrier<Arch> barrier_;
  uint8_t *const shared_;
};

}  // namespace
}  // namespace nf4::cuda
