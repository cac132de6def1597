// The scale of a quantization block: one policy for each way in which a weight stores its scales. A
// kernel fetches the stored parts of a scale early and finishes the scale when it is needed, so
// that the latency of the loads overlaps with other work.
#pragma once

#include <cuda_runtime.h>

#include "core/decode.hpp"
#include "core/formats.hpp"
#include "core/scale_bytes.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/weight/view.hpp"

namespace nf4::cuda {
namespace {

// The load instructions that a policy may use. The compiler may move LoadNc above
// griddepcontrol.wait, so the order must be checked in the SASS of a kernel that uses it.
struct LoadNc {
  template <class T>
  static __device__ __forceinline__ T load(const T *address) {
    return __ldg(address);
  }
};
struct LoadGlobal {
  template <class T>
  static __device__ __forceinline__ T load(const T *address) {
    return *address;
  }
};

// The scales themselves are in absmax.
struct FlatScales {
  static constexpr ScaleKind kKind = kFlatScales;
  static constexpr bool kNested = false;
  static constexpr bool kLowNibbleFirst = false;  // the codes of such a weight
  static constexpr int kTableSize = 0;            // the size of ScaleTable
  using Stored = float;                           // one scale in absmax
  using Quad = float4;                            // four scales
  struct Fetched {
    float absmax;
  };

  template <class Load>
  static __device__ __forceinline__ Fetched fetch(const WeightView &weight, int64_t block) {
    return {Load::load(static_cast<const Stored *>(weight.absmax) + block)};
  }
  // Prefetches into L2, which is allowed while the predecessor still writes.
  static __device__ __forceinline__ void prefetch(const WeightView &weight, int64_t block) {
    prefetch_l2_sector(static_cast<const Stored *>(weight.absmax) + block);
  }
  template <class Table>
  static __device__ __forceinline__ float finish(Fetched fetched, const Table &) {
    return fetched.absmax;
  }
  static __device__ __forceinline__ float of_quad(const Quad *quad, int index) {
    return reinterpret_cast<const float *>(quad)[index];
  }
  // A first scale, followed by the quad without its last one.
  static __device__ __forceinline__ Quad prepend(Stored first, const Quad &quad) {
    return {first, quad.x, quad.y, quad.z};
  }

  // Reads scales by 32-bit offsets from a block on.
  class Cursor {
   public:
    __device__ __forceinline__ Cursor(const WeightView &weight, int64_t first_block)
        : absmax_(static_cast<const char *>(weight.absmax) + first_block * sizeof(Stored)) {}
    template <class Load>
    __device__ __forceinline__ Fetched fetch(const WeightView &, int block) const {
      return {Load::load(reinterpret_cast<const Stored *>(absmax_) + block)};
    }

   private:
    const char *absmax_;  // in bytes; the compiler adds 4 block to it in one instruction
  };

  // The scales of two blocks in one load, from an even block on.
  struct Pair {
    float2 absmax;

    template <class Load>
    __device__ __forceinline__ void fetch(const WeightView &weight, int block) {
      absmax = Load::load(
          reinterpret_cast<const float2 *>(static_cast<const Stored *>(weight.absmax) + block));
    }
    template <class Table>
    __device__ __forceinline__ float2 finish(const Table &) const {
      return absmax;
    }
  };

  // The scales of kBlocks blocks in one load, from an aligned block on.
  struct Vector {
    static constexpr int kBlocks = 4;
    float4 absmax;

    template <class Load>
    static __device__ __forceinline__ Vector fetch(const WeightView &weight, int64_t block) {
      return {Load::load(
          reinterpret_cast<const float4 *>(static_cast<const Stored *>(weight.absmax) + block))};
    }
    // Returns the scales of blocks 2 pair and 2 pair + 1.
    template <class Table>
    __device__ __forceinline__ float2 finish(int pair, const Table &) const {
      return pair == 0 ? float2{absmax.x, absmax.y} : float2{absmax.z, absmax.w};
    }
  };
};

// absmax has scale codes, which are quantized in nested blocks.
struct NestedScales {
  static constexpr ScaleKind kKind = kNestedScales;
  static constexpr bool kNested = true;
  static constexpr bool kLowNibbleFirst = false;
  static constexpr int kTableSize = kScaleCodeSize;
  using Stored = uint8_t;
  using Quad = uint32_t;
  struct Fetched {
    float absmax;  // the absmax of the nested block
    uint32_t code;
  };

  template <class Load>
  static __device__ __forceinline__ Fetched fetch(const WeightView &weight, int64_t block) {
    return {Load::load(weight.nested_absmax + (block >> weight.nested_blocksize_log2)),
            Load::load(static_cast<const Stored *>(weight.absmax) + block)};
  }
  static __device__ __forceinline__ void prefetch(const WeightView &weight, int64_t block) {
    prefetch_l2_sector(static_cast<const Stored *>(weight.absmax) + block);
    prefetch_l2_sector(weight.nested_absmax + (block >> weight.nested_blocksize_log2));
  }
  template <class Table>
  static __device__ __forceinline__ float finish(Fetched fetched, const Table &table) {
    return nested_scale(table[fetched.code], fetched.absmax, table.offset());
  }
  static __device__ __forceinline__ uint32_t of_quad(const Quad *quad, int index) {
    return __byte_perm(*quad, 0, 0x4440 | index);
  }
  static __device__ __forceinline__ Quad prepend(Stored first, Quad quad) {
    return quad << 8 | first;
  }

  class Cursor {
   public:
    __device__ __forceinline__ Cursor(const WeightView &weight, int64_t first_block)
        : absmax_(static_cast<const Stored *>(weight.absmax) + first_block),
          nested_absmax_(weight.nested_absmax + (first_block >> weight.nested_blocksize_log2)),
          phase_(
              static_cast<int>(first_block & ((int64_t{1} << weight.nested_blocksize_log2) - 1))) {}
    template <class Load>
    __device__ __forceinline__ Fetched fetch(const WeightView &weight, int block) const {
      return {Load::load(nested_absmax_ + ((phase_ + block) >> weight.nested_blocksize_log2)),
              Load::load(absmax_ + block)};
    }

   private:
    const Stored *absmax_;
    const float *nested_absmax_;
    int phase_;  // place of the first block in its nested block
  };

  // Both blocks are in one nested block, which has two or more.
  struct Pair {
    uint16_t codes;
    float absmax;

    template <class Load>
    __device__ __forceinline__ void fetch(const WeightView &weight, int block) {
      codes = Load::load(
          reinterpret_cast<const uint16_t *>(static_cast<const Stored *>(weight.absmax) + block));
      absmax = Load::load(weight.nested_absmax + (block >> weight.nested_blocksize_log2));
    }
    template <class Table>
    __device__ __forceinline__ float2 finish(const Table &table) const {
      return {nested_scale(table[codes & 255u], absmax, table.offset()),
              nested_scale(table[codes >> 8], absmax, table.offset())};
    }
  };

  // All blocks are in one nested block.
  struct Vector {
    static constexpr int kBlocks = 8;
    uint2 codes;
    float absmax;

    template <class Load>
    static __device__ __forceinline__ Vector fetch(const WeightView &weight, int64_t block) {
      return {Load::load(reinterpret_cast<const uint2 *>(
                  static_cast<const Stored *>(weight.absmax) + block)),
              Load::load(weight.nested_absmax + (block >> weight.nested_blocksize_log2))};
    }
    template <class Table>
    __device__ __forceinline__ float2 finish(int pair, const Table &table) const {
      const uint32_t both = (pair < 2 ? codes.x : codes.y) >> pair % 2 * 16;
      return {nested_scale(table[both & 255u], absmax, table.offset()),
              nested_scale(table[both >> 8 & 255u], absmax, table.offset())};
    }
  };
};

// absmax has numbers of 8 bits: those of MXFP4, or those of NVFP4, which has global scales, too.
struct ByteScales {
  static constexpr ScaleKind kKind = kByteScales;
  static constexpr bool kNested = false;
  static constexpr bool kLowNibbleFirst = true;
  static constexpr int kTableSize = 0;
  using Stored = uint8_t;
  struct Fetched {
    uint32_t byte;
    ScaleBytes kind;  // this and the next are the same for all scales of a weight
    bool global_divides;
    float global;
  };

  // The place of a block's global scale. Divisions are slow, and most weights have one global
  // scale.
  static __device__ __forceinline__ int64_t part_of(int64_t block, int64_t global_blocks) {
    if (block < global_blocks) return 0;
    if (block > UINT32_MAX) return block / global_blocks;
    return static_cast<uint32_t>(block) / static_cast<uint32_t>(global_blocks);
  }

  template <class Load>
  static __device__ __forceinline__ Fetched fetch(const WeightView &weight, int64_t block) {
    Fetched fetched{Load::load(static_cast<const Stored *>(weight.absmax) + block),
                    weight.scale_bytes, weight.global_divides, 1.0f};
    if (weight.scale_bytes == ScaleBytes::kE4M3)
      fetched.global = Load::load(weight.nested_absmax + part_of(block, weight.global_blocks));
    return fetched;
  }
  template <class Table>
  static __device__ __forceinline__ float finish(const Fetched &fetched, const Table &) {
    if (fetched.kind == ScaleBytes::kE8M0) return __uint_as_float(e8m0_bits(fetched.byte));
    return global_scaled(e4m3_value(fetched.byte), fetched.global, fetched.global_divides);
  }
};

// The table in which finish() looks codes up: nested_code in shared memory, where a look-up by 32
// lanes is cheap, and nested_offset. Flat scales need neither.
template <class Scales>
class ScaleTable {
 public:
  // `entries` is in shared memory and has Scales::kTableSize floats.
  __device__ __forceinline__ explicit ScaleTable(float *entries) : entries_(entries), offset_(0) {}

  // All Threads threads of the CTA call it. A barrier must follow unless Scales::kTableSize is 0.
  template <class Load, int Threads>
  __device__ __forceinline__ void load(const WeightView &weight) {
    if constexpr (Scales::kTableSize > 0) {
      offset_ = Load::load(weight.nested_offset);
#pragma unroll
      for (int i = 0; i < Scales::kTableSize; i += Threads)
        if (Threads <= Scales::kTableSize || threadIdx.x < Scales::kTableSize)
          entries_[i + threadIdx.x] = Load::load(weight.nested_code + i + threadIdx.x);
    }
  }

  // The same with cp.async; the caller waits for the copies before the barrier.
  template <class Load, int Threads>
  __device__ __forceinline__ void load_async(const WeightView &weight) {
    if constexpr (Scales::kTableSize > 0) {
      offset_ = Load::load(weight.nested_offset);
      static_assert(Threads >= Scales::kTableSize);
      if (threadIdx.x < Scales::kTableSize)
        cp_async_4(entries_ + threadIdx.x, weight.nested_code + threadIdx.x);
    }
  }

  __device__ __forceinline__ float operator[](uint32_t code) const { return entries_[code]; }
  __device__ __forceinline__ float offset() const { return offset_; }

 private:
  float *entries_;
  float offset_;
};

}  // namespace
}  // namespace nf4::cuda
