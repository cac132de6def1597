// The scales of a CTA's rows of a weight with a codebook, in shared memory. They are copied as they
// are stored, all at once and without waiting, and finished (absmax times scale code plus offset)
// when they are used.
#pragma once

#include "cuda/matmul/skinny/args.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

// Copies by cp.async, if the architecture has it.
template <class Arch, class Item>
__device__ __forceinline__ void copy_item(Item *to, const Item *from) {
  static_assert(sizeof(Item) == 4 || sizeof(Item) == 8 || sizeof(Item) == 16);
  if constexpr (!Arch::kTensorCores)
    *to = *from;
  else if constexpr (sizeof(Item) < 16)
    cp_async_small<sizeof(Item)>(to, from);
  else
    cp_async_16(to, from, 16);
}

// Tracks when the scales that all threads copy are in shared memory.
template <class Arch, int kThreads = kSkinnyThreads>
class ScaleBarrier {
 public:
  __device__ __forceinline__ explicit ScaleBarrier(uint8_t *barrier)
      : barrier_(reinterpret_cast<uint64_t *>(barrier)) {}

  // All threads call it before everything else.
  __device__ __forceinline__ void init() const {
    if constexpr (Arch::kTensorMaps) {
      if (threadIdx.x != 0) return;
      mbarrier_init(barrier_, kThreads);
      fence_mbarrier_init();
    }
  }

  // Follows the copies: commits their cp.async group if the kernel counts groups.
  __device__ __forceinline__ void commit() const {
    if constexpr (Arch::kTensorCores && !Arch::kTensorMaps) cp_async_commit();
  }

  // All threads call it. Their stores to shared memory are visible to all when it returns; copied
  // data is visible after wait(). With `one_later`, one younger cp.async group may be pending. With
  // `asynchronous`, everything was copied by cp.async.
  __device__ __forceinline__ void publish(bool one_later, bool asynchronous) const {
    if constexpr (Arch::kTensorMaps) {
      __syncthreads();
      if (asynchronous) {
        cp_async_mbarrier_arrive(barrier_);
      } else {
        cp_async_wait_all();
        mbarrier_arrive(barrier_);
      }
    } else if constexpr (!Arch::kTensorCores) {
      __syncthreads();
    } else {
      if (one_later)
        cp_async_wait<1>();
      else
        cp_async_wait_all();
      __syncthreads();
    }
  }

  __device__ __forceinline__ void wait(uint32_t phase) const {
    if constexpr (Arch::kTensorMaps) mbarrier_wait_parity(barrier_, phase);
  }

 private:
  uint64_t *const barrier_;
};

// The distance between rows is an odd number of items, so that reading the items of 8 rows has no
// bank conflicts. Element is a type for the number of any element of the weight.
template <class Arch, class Scales, int kThreads, class Element = uint32_t>
class ScaleStage {
  // A thread waits for its loads where there is no cp.async.
  static constexpr int kUnroll = Arch::kTensorCores ? 1 : 4;

 public:
  using Item = typename Scales::Quad;  // the scales of a warp tile's row

  __device__ __forceinline__ ScaleStage(const SkinnyArgs &args, uint8_t *shared, int barrier)
      : args_(args),
        barrier_(shared + barrier),
        scale_code_(reinterpret_cast<float *>(shared + args.smem_scale_code)),
        nested_absmax_(reinterpret_cast<float *>(shared + args.smem_nested_absmax)),
        items_(reinterpret_cast<Item *>(shared + args.smem_scales)) {}

  // All threads call it before everything else.
  __device__ __forceinline__ void init() const { barrier_.init(); }

  // Starts the copy of the scale code, once.
  __device__ __forceinline__ void load_scale_code() const {
    if constexpr (Scales::kNested) {
      if (threadIdx.x >= kScaleCodeSize) return;
#pragma unroll
      for (int i = 0; i < kScaleCodeCopies; ++i)
        copy_item<Arch>(scale_code_ + threadIdx.x * kScaleCodeCopies + i,
                        args_.matmul.weight.nested_code + threadIdx.x);
    }
  }

  // Starts the copies of the scales of `rows` rows from first_row on, and commits their cp.async
  // group if the kernel counts groups.
  __device__ __forceinline__ void load(int first_row, int rows) {
    const MatmulArgs &matmul = args_.matmul;
    const Element first_element = first_row * static_cast<Element>(matmul.weight.cols);
    if constexpr (Scales::kNested) {
      const int shift = matmul.weight.blocksize_log2 + matmul.weight.nested_blocksize_log2;
      nested_phase_ = static_cast<int>(first_element & ((Element{1} << shift) - 1));
      const int last = (nested_phase_ + rows * static_cast<int>(matmul.weight.cols) - 1) >> shift;
      const float *const from = matmul.weight.nested_absmax + (first_element >> shift);
#pragma unroll 1
      for (int i = threadIdx.x; i <= last; i += kThreads)
        copy_item<Arch>(nested_absmax_ + i, from + i);
    }
    const Item *const from =
        static_cast<const Item *>(matmul.weight.absmax) + first_element / kWarpTileK;
    const int items = rows * args_.work.k_tiles;
    uint32_t row = args_.work.k_tiles_divisor.divide(threadIdx.x);
    int k_tile = static_cast<int>(threadIdx.x - row * args_.work.k_tiles);
#pragma unroll kUnroll
    for (int i = threadIdx.x; i < items; i += kThreads) {
      Item *const to = items_ + row * args_.scale_pitch + k_tile;
      if (args_.whole_items)
        copy_item<Arch>(to, from + i);
      else
        *to = gather(first_element + row * static_cast<Element>(matmul.weight.cols), k_tile);
      row += args_.row_step;
      k_tile += args_.k_tile_step;
      if (k_tile >= args_.work.k_tiles) {
        k_tile -= args_.work.k_tiles;
        ++row;
      }
    }
    barrier_.commit();
  }

  // The data that load() copies is visible after wait().
  __device__ __forceinline__ void publish(bool one_later) const {
    barrier_.publish(one_later, args_.whole_items);
  }
  __device__ __forceinline__ void wait(uint32_t phase) const { barrier_.wait(phase); }

  // Finds the scales of a lane's rows `row` and row + 8 of a warp tile, for the thread_in_group-th
  // kScaleK columns.
  struct Cursor {
    const Item *item;
    int element;  // from the start of a nested block
  };
  __device__ __forceinline__ Cursor cursor(int k_tile, int tile, int row,
                                           int thread_in_group) const {
    const int cols = static_cast<int>(args_.matmul.weight.cols);
    // Past the last column any scale of the row may be used; another row's scale might be a NaN.
    int column = k_tile * kWarpTileK + thread_in_group * kScaleK;
    if (column >= cols) column = k_tile * kWarpTileK;
    const int first = tile * kWarpTileN + row;
    return {items_ + first * args_.scale_pitch + k_tile, nested_phase_ + first * cols + column};
  }
  __device__ __forceinline__ void advance(Cursor &cursor) const {
    cursor.item += args_.item_step;
    cursor.element += args_.element_step;
  }
  __device__ __forceinline__ float2 get(const Cursor &cursor, int thread_in_group,
                                        float offset) const {
    const WeightView &weight = args_.matmul.weight;
    const Table table{scale_code_, offset};
    const Item *const item8 = cursor.item + 8 * args_.scale_pitch;
    if constexpr (Scales::kNested) {
      const int shift = weight.blocksize_log2 + weight.nested_blocksize_log2;
      const int element8 = cursor.element + 8 * static_cast<int>(weight.cols);
      return {
          Scales::finish({nested_absmax_[cursor.element >> shift],
                          Scales::of_quad(cursor.item, thread_in_group)},
                         table),
          Scales::finish(
              {nested_absmax_[element8 >> shift], Scales::of_quad(item8, thread_in_group)}, table)};
    } else {
      return {Scales::finish({Scales::of_quad(cursor.item, thread_in_group)}, table),
              Scales::finish({Scales::of_quad(item8, thread_in_group)}, table)};
    }
  }

 private:
  // The table in which Scales::finish() looks codes up.
  struct Table {
    const float *scale_code;
    float nested_offset;
    __device__ __forceinline__ float operator[](uint32_t code) const {
      return scale_code[code * kScaleCodeCopies + threadIdx.x % kScaleCodeCopies];
    }
    __device__ __forceinline__ float offset() const { return nested_offset; }
  };

  __device__ __forceinline__ Item gather(Element row_element, int k_tile) const {
    const MatmulArgs &matmul = args_.matmul;
    Item item{};
#pragma unroll 1
    for (int i = 3; i >= 0; --i) {
      int column = k_tile * kWarpTileK + i * kScaleK;
      if (column >= matmul.weight.cols) column = k_tile * kWarpTileK;
      const Element block = (row_element + column) >> matmul.weight.blocksize_log2;
      item = Scales::prepend(
          static_cast<const typename Scales::Stored *>(matmul.weight.absmax)[block], item);
    }
    return item;
  }

  const SkinnyArgs &args_;
  const ScaleBarrier<Arch, kThreads> barrier_;
  float *const scale_code_;
  float *const nested_absmax_;
  Item *const items_;
  int nested_phase_ = 0;
};

}  // namespace
}  // namespace nf4::cuda
