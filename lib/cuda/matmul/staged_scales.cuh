// The scales of a thread block's rows in shared memory: what they are made of is copied at once,
// and made into scales where they are used.
#pragma once

#include "core/decode.hpp"
#include "core/formats.hpp"
#include "cuda/matmul/few_args.hpp"

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

// Shared memory has, for each slice of each tile, the items of 16 rows and room for one more, so
// that neither writing nor reading meets bank conflicts.
template <bool Nested>
class StagedScales {
 public:
  using Item = typename RawScales<Nested>::Item;
  static constexpr int kStride = kTileRows + 1;

  __device__ __forceinline__ StagedScales(const FewArgs &few, uint8_t *shared)
      : few_(few),
        code_(reinterpret_cast<float *>(shared + few.shared_code)),
        nested_(reinterpret_cast<float *>(shared + few.shared_nested)),
        items_(reinterpret_cast<Item *>(shared + few.shared_scales)) {}

  // The 8-bit code, once; a barrier must follow.
  __device__ __forceinline__ void put_code(float entry) const {
    if constexpr (Nested) {
      if (threadIdx.x >= kScaleCodeSize) return;
      static_assert(kScaleCodeCopies == 4);
      reinterpret_cast<float4 *>(code_)[threadIdx.x] = {entry, entry, entry, entry};
    }
  }

  // Copies what `rows` rows from first_row on have, and calls `meanwhile` while the first of it
  // is on its way; a barrier must follow.
  template <class Meanwhile>
  __device__ __forceinline__ void stage(int first_row, int rows, Meanwhile meanwhile) {
    const MatmulArgs &args = few_.matmul;
    const uint32_t first_element = first_row * static_cast<uint32_t>(args.cols);
    const Item *from = static_cast<const Item *>(args.absmax) + first_element / kSlice;
    Cursor to(few_, rows);
    Item batch[kBatch];
    if (few_.whole_items) fetch(from, to, batch);
    const NestedRange nested(args, first_element, rows);
    float first_nested = 0;
    if (Nested && threadIdx.x < nested.count) first_nested = nested.from[threadIdx.x];
    nested_phase_ = nested.phase;
    meanwhile();
    if (few_.whole_items) {
#pragma unroll 1
      while (true) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) put(to, batch[i]);
        if (to.item >= to.end) break;
        fetch(from, to, batch);
      }
    } else {
#pragma unroll 1
      while (to.item < to.end)
        put(to, gather(first_element + to.row * static_cast<uint32_t>(args.cols), to.slice));
    }
    if (Nested && threadIdx.x < nested.count) nested_[threadIdx.x] = first_nested;
#pragma unroll 1
    for (int i = threadIdx.x + kFewThreads; i < nested.count; i += kFewThreads)
      nested_[i] = nested.from[i];
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
    return {items_ + (tile * few_.slices + slice) * kStride + row,
            nested_phase_ + (tile * kTileRows + row) * cols + column};
  }
  __device__ __forceinline__ void advance(Place &place) const {
    place.item += few_.tile_step * few_.slices * kStride;
    place.element += few_.tile_step * kTileRows * static_cast<int>(few_.matmul.cols);
  }
  __device__ __forceinline__ float2 get(const Place &place, int member, float offset) const {
    const MatmulArgs &args = few_.matmul;
    if constexpr (Nested) {
      const int shift = args.blocksize_log2 + args.nested_blocksize_log2;
      const int below = place.element + 8 * static_cast<int>(args.cols);
      return {nested_scale(code(place.item[0], member), nested_[place.element >> shift], offset),
              nested_scale(code(place.item[8], member), nested_[below >> shift], offset)};
    } else {
      return {reinterpret_cast<const float *>(place.item)[member],
              reinterpret_cast<const float *>(place.item + 8)[member]};
    }
  }

 private:
  static constexpr int kBatch = 4;

  // This thread's share of the items: every kFewThreads-th.
  struct Cursor {
    int item;
    int end;
    uint32_t row;
    int slice;
    __device__ __forceinline__ Cursor(const FewArgs &few, int rows)
        : item(threadIdx.x),
          end(rows * few.slices),
          row(threadIdx.x * few.inverse_slices >> kInverseShift),
          slice(static_cast<int>(threadIdx.x - row * few.slices)) {}
  };

  // The entries of nested_absmax that rows need, and where in a nested block they begin.
  struct NestedRange {
    const float *from = nullptr;
    int count = 0;
    int phase = 0;
    __device__ __forceinline__ NestedRange(const MatmulArgs &args, uint32_t first_element,
                                           int rows) {
      if constexpr (Nested) {
        const int shift = args.blocksize_log2 + args.nested_blocksize_log2;
        phase = static_cast<int>(first_element & ((1u << shift) - 1));
        from = args.nested_absmax + (first_element >> shift);
        count = ((phase + rows * static_cast<int>(args.cols) - 1) >> shift) + 1;
      }
    }
  };

  static __device__ __forceinline__ void fetch(const Item *from, const Cursor &cursor,
                                               Item (&batch)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (cursor.item + i * kFewThreads < cursor.end)
        batch[i] = from[cursor.item + i * kFewThreads];
  }

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

  __device__ __forceinline__ void put(Cursor &to, Item item) const {
    Item *const address =
        items_ + ((to.row / kTileRows * few_.slices + to.slice) * kStride + to.row % kTileRows);
    if (to.item < to.end) *address = item;
    to.item += kFewThreads;
    to.row += few_.row_step;
    to.slice += few_.slice_step;
    if (to.slice >= few_.slices) {
      to.slice -= few_.slices;
      ++to.row;
    }
  }

  __device__ __forceinline__ float code(uint32_t item, int member) const {
    const uint32_t q = __byte_perm(item, 0, 0x4440 | member);
    return code_[q * kScaleCodeCopies + threadIdx.x % kScaleCodeCopies];
  }

  const FewArgs &few_;
  float *const code_;
  float *const nested_;
  Item *const items_;
  int nested_phase_ = 0;
};

}  // namespace
}  // namespace nf4::cuda
