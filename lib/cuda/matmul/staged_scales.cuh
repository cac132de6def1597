// The scales of a thread block's rows in shared memory: what they are made of is copied at once,
// by copies that no thread waits in, and made into scales where they are used.
#pragma once

#include "core/decode.hpp"
#include "core/formats.hpp"
#include "cuda/matmul/few_args.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace nf4::cuda {
namespace {

// What the scales of a slice of a row, its four quarters, are made of.
template <bool Nested>
struct RawScales {
  using Item = uint32_t;  // four numbers of 8 bits
};
template <>
struct RawScales<false> {
  using Item = float4;
};

__device__ __forceinline__ void copy_item(uint32_t *to, const uint32_t *from) {
  cp_async_4(to, from);
}
__device__ __forceinline__ void copy_item(float4 *to, const float4 *from) {
  cp_async_16(to, from, 16);
}

// Shared memory has the items of each row at an odd distance from those of the next, so that
// reading those of 8 rows meets no bank conflicts.
template <class Arch, bool Nested>
class StagedScales {
 public:
  using Item = typename RawScales<Nested>::Item;

  __device__ __forceinline__ StagedScales(const FewArgs &few, uint8_t *shared, int barrier)
      : few_(few),
        barrier_(reinterpret_cast<uint64_t *>(shared + barrier)),
        code_(reinterpret_cast<float *>(shared + few.shared_code)),
        nested_(reinterpret_cast<float *>(shared + few.shared_nested)),
        items_(reinterpret_cast<Item *>(shared + few.shared_scales)) {}

  // Before all else, by all threads.
  __device__ __forceinline__ void init() const {
    if constexpr (Arch::kTensorMaps) {
      if (threadIdx.x != 0) return;
      mbarrier_init(barrier_, kFewThreads);
      fence_mbarrier_init();
    }
  }

  // Asks for the 8-bit code, once.
  __device__ __forceinline__ void stage_code() const {
    if constexpr (Nested) {
      if (threadIdx.x >= kScaleCodeSize) return;
#pragma unroll
      for (int i = 0; i < kScaleCodeCopies; ++i)
        cp_async_4(code_ + threadIdx.x * kScaleCodeCopies + i,
                   few_.matmul.nested_code + threadIdx.x);
    }
  }

  // Asks for what `rows` rows from first_row on have, and ends a group of copies if they come in
  // groups.
  __device__ __forceinline__ void stage(int first_row, int rows) {
    const MatmulArgs &args = few_.matmul;
    const uint32_t first_element = first_row * static_cast<uint32_t>(args.cols);
    if constexpr (Nested) {
      const int shift = args.blocksize_log2 + args.nested_blocksize_log2;
      nested_phase_ = static_cast<int>(first_element & ((1u << shift) - 1));
      const int last = (nested_phase_ + rows * static_cast<int>(args.cols) - 1) >> shift;
      const float *const from = args.nested_absmax + (first_element >> shift);
#pragma unroll 1
      for (int i = threadIdx.x; i <= last; i += kFewThreads) cp_async_4(nested_ + i, from + i);
    }
    const Item *const from = static_cast<const Item *>(args.absmax) + first_element / kSlice;
    const int items = rows * few_.slices;
    uint32_t row = threadIdx.x * few_.inverse_slices >> kInverseShift;
    int slice = static_cast<int>(threadIdx.x - row * few_.slices);
#pragma unroll 1
    for (int i = threadIdx.x; i < items; i += kFewThreads) {
      Item *const to = items_ + row * few_.scale_pitch + slice;
      if (few_.whole_items)
        copy_item(to, from + i);
      else
        *to = gather(first_element + row * static_cast<uint32_t>(args.cols), slice);
      row += few_.row_step;
      slice += few_.slice_step;
      if (slice >= few_.slices) {
        slice -= few_.slices;
        ++row;
      }
    }
    if constexpr (!Arch::kTensorMaps) cp_async_commit();
  }

  // All threads, whose stores to shared memory all see when it returns. What was staged is there
  // after wait(). If `one_later`, one group of copies that was begun later need not be.
  __device__ __forceinline__ void meet(bool one_later) const {
    if constexpr (Arch::kTensorMaps) {
      __syncthreads();
      if (few_.whole_items) {
        cp_async_mbarrier_arrive(barrier_);
      } else {
        cp_async_wait_all();
        mbarrier_arrive(barrier_);
      }
    } else {
      if (one_later)
        cp_async_wait<1>();
      else
        cp_async_wait_all();
      __syncthreads();
    }
  }

  // `parity` is that of the groups which were staged before.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    if constexpr (Arch::kTensorMaps) mbarrier_wait_parity(barrier_, parity);
  }

  // Where a lane finds the scales of its rows `row` and row + 8 of a tile: of quarter `member`.
  struct Place {
    const Item *item;
    int element;  // from the start of a nested block
  };
  __device__ __forceinline__ Place place(int slice, int tile, int row, int member) const {
    const int cols = static_cast<int>(few_.matmul.cols);
    // Where there is no such column the scale counts for nothing, and must not be a NaN of
    // another row's.
    int column = slice * kSlice + member * kQuarter;
    if (column >= cols) column = slice * kSlice;
    const int first = tile * kTileRows + row;
    return {items_ + first * few_.scale_pitch + slice, nested_phase_ + first * cols + column};
  }
  __device__ __forceinline__ void advance(Place &place) const {
    place.item += few_.item_step;
    place.element += few_.element_step;
  }
  __device__ __forceinline__ float2 get(const Place &place, int member, float offset) const {
    const MatmulArgs &args = few_.matmul;
    const Item *const below_item = place.item + 8 * few_.scale_pitch;
    if constexpr (Nested) {
      const int shift = args.blocksize_log2 + args.nested_blocksize_log2;
      const int below = place.element + 8 * static_cast<int>(args.cols);
      return {nested_scale(code(*place.item, member), nested_[place.element >> shift], offset),
              nested_scale(code(*below_item, member), nested_[below >> shift], offset)};
    } else {
      return {reinterpret_cast<const float *>(place.item)[member],
              reinterpret_cast<const float *>(below_item)[member]};
    }
  }

 private:
  __device__ __forceinline__ Item gather(uint32_t row_element, int slice) const {
    const MatmulArgs &args = few_.matmul;
    Item item{};
#pragma unroll 1
    for (int quarter = 3; quarter >= 0; --quarter) {
      int column = slice * kSlice + quarter * kQuarter;
      if (column >= args.cols) column = slice * kSlice;
      const uint32_t block = (row_element + column) >> args.blocksize_log2;
      if constexpr (Nested)
        item = item << 8 | static_cast<const uint8_t *>(args.absmax)[block];
      else
        item = {static_cast<const float *>(args.absmax)[block], item.x, item.y, item.z};
    }
    return item;
  }

  __device__ __forceinline__ float code(uint32_t item, int member) const {
    const uint32_t q = __byte_perm(item, 0, 0x4440 | member);
    return code_[q * kScaleCodeCopies + threadIdx.x % kScaleCodeCopies];
  }

  const FewArgs &few_;
  uint64_t *const barrier_;
  float *const code_;
  float *const nested_;
  Item *const items_;
  int nested_phase_ = 0;
};

}  // namespace
}  // namespace nf4::cuda
