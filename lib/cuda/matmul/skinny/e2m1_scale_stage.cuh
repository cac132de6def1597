// The scale bytes of a CTA's rows of an MXFP4 or NVFP4 weight, in shared memory. They are copied as
// they are stored, all at once and without waiting.
#pragma once

#include "cuda/matmul/skinny/scale_stage.cuh"

namespace nf4::cuda {
namespace {

// The scale bytes of a lane's rows `row` and row + 8 of a warp tile. The functions below find bytes
// of both, two in the halves of each word.
struct TileScaleBytes {
  const uint8_t *row;
  const uint8_t *row8;
  ScaleBytes kind;
  bool small_blocks;  // blocks have 16 columns, not 32

  // Finds the bytes of each 16 of the kScaleK columns of thread_in_group.
  __device__ __forceinline__ void of_columns(int thread_in_group, uint32_t (&bytes)[4]) const {
    const int offset = small_blocks ? thread_in_group * 4 : thread_in_group / 2 * 4;
    const uint32_t shift = small_blocks ? 0 : thread_in_group % 2 * 0x0202;
    const uint32_t first = (small_blocks ? 0x4140 : 0x4040) + shift;
    const uint32_t second = (small_blocks ? 0x4342 : 0x4141) + shift;
    const uint32_t word = *reinterpret_cast<const uint32_t *>(row + offset);
    const uint32_t word8 = *reinterpret_cast<const uint32_t *>(row8 + offset);
    bytes[0] = __byte_perm(word, 0, first);
    bytes[1] = __byte_perm(word, 0, second);
    bytes[2] = __byte_perm(word8, 0, first);
    bytes[3] = __byte_perm(word8, 0, second);
  }

  // Finds the bytes of the thread_in_group-th 16 columns of two blocks of kScaleK columns: the
  // first two or the last two of a warp tile.
  __device__ __forceinline__ void of_blocks(int thread_in_group, int half,
                                            uint32_t (&bytes)[2]) const {
    if (small_blocks) {
      const uint2 words = reinterpret_cast<const uint2 *>(row)[half];
      const uint2 words8 = reinterpret_cast<const uint2 *>(row8)[half];
      const uint32_t select = thread_in_group * 0x0101 | 0x0400;
      bytes[0] = __byte_perm(words.x, words.y, select) & 0x00ff00ffu;
      bytes[1] = __byte_perm(words8.x, words8.y, select) & 0x00ff00ffu;
    } else {
      const uint32_t select = 0x4240 | thread_in_group / 2 * 0x0101;
      bytes[0] = __byte_perm(reinterpret_cast<const uint32_t *>(row)[half], 0, select);
      bytes[1] = __byte_perm(reinterpret_cast<const uint32_t *>(row8)[half], 0, select);
    }
  }
};

// Like ScaleStage. An item has the bytes of a warp tile's row.
template <class Arch, int kThreads, class Element>
class ScaleStage<Arch, ByteScales, kThreads, Element> {
  static constexpr int kUnroll = 4;

 public:
  __device__ __forceinline__ ScaleStage(const SkinnyArgs &args, uint8_t *shared, int barrier)
      : args_(args),
        barrier_(shared + barrier),
        items_(shared + args.smem_scales),
        item_bytes_(kWarpTileK >> args.matmul.weight.blocksize_log2) {}

  __device__ __forceinline__ void init() const { barrier_.init(); }
  __device__ __forceinline__ void load_scale_code() const {}

  __device__ __forceinline__ void load(Element first_row, int rows) const {
    const WeightView &weight = args_.matmul.weight;
    const auto row_bytes = static_cast<int>(weight.cols >> weight.blocksize_log2);
    const uint8_t *const from =
        static_cast<const uint8_t *>(weight.absmax) + static_cast<int64_t>(first_row) * row_bytes;
    const int items = rows * args_.work.k_tiles;
    if (args_.whole_items && item_bytes_ == 8)
      copy_items<uint2>(from, items);
    else if (args_.whole_items)
      copy_items<uint4>(from, items);
    else if (item_bytes_ == 8)
      copy_parts<uint16_t>(from, items, row_bytes);
    else
      copy_parts<uint32_t>(from, items, row_bytes);
    barrier_.commit();
  }

  __device__ __forceinline__ void publish(bool one_later) const {
    barrier_.publish(one_later, args_.whole_items);
  }
  __device__ __forceinline__ void wait(uint32_t phase) const { barrier_.wait(phase); }

  using Cursor = const uint8_t *;
  __device__ __forceinline__ Cursor cursor(int k_tile, int tile, int row, int) const {
    return items_ + ((tile * kWarpTileN + row) * args_.scale_pitch + k_tile) * item_bytes_;
  }
  __device__ __forceinline__ void advance(Cursor &cursor) const {
    cursor += args_.item_step * item_bytes_;
  }
  __device__ __forceinline__ TileScaleBytes get(Cursor cursor, int, float) const {
    return {cursor, cursor + 8 * args_.scale_pitch * item_bytes_, args_.matmul.weight.scale_bytes,
            item_bytes_ == 16};
  }

 private:
  __device__ __forceinline__ uint8_t *place(int item, int &k_tile, int &row) const {
    row = static_cast<int>(args_.work.k_tiles_divisor.divide(item));
    k_tile = item - row * args_.work.k_tiles;
    return items_ + (row * args_.scale_pitch + k_tile) * item_bytes_;
  }

  template <class Item>
  __device__ __forceinline__ void copy_items(const uint8_t *from, int items) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < items; i += kThreads) {
      int row, k_tile;
      copy_item<Arch>(reinterpret_cast<Item *>(place(i, k_tile, row)),
                      reinterpret_cast<const Item *>(from) + i);
    }
  }

  // Copies the bytes of each kScaleK columns, and zeros past the last column.
  template <class Part>
  __device__ __forceinline__ void copy_parts(const uint8_t *from, int items, int row_bytes) const {
#pragma unroll kUnroll
    for (int i = threadIdx.x; i < items * 4; i += kThreads) {
      int row, k_tile;
      auto *const to = reinterpret_cast<Part *>(place(i / 4, k_tile, row)) + i % 4;
      const int byte = (k_tile * 4 + i % 4) * static_cast<int>(sizeof(Part));
      *to = byte < row_bytes ? *reinterpret_cast<const Part *>(from + row * row_bytes + byte)
                             : Part{0};
    }
  }

  const SkinnyArgs &args_;
  const ScaleBarrier<Arch, kThreads> barrier_;
  uint8_t *const items_;
  const int item_bytes_;
};

}  // namespace
}  // namespace nf4::cuda
