// Weights with a codebook, for the multistage kernels: look-ups and scales.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/matmul/configs.hpp"
#include "cuda/matmul/multistage/args.hpp"
#include "cuda/matmul/multistage/epilogue.cuh"
#include "cuda/matmul/multistage/row_packed.cuh"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/weight/byte_lut.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

// A table in shared memory of the 256 pairs of entries that a byte may have, an Entry each, in 16
// or 32 copies side by side, so that the lanes that load at a time read from different banks.
template <class Entry>
class PairLut {
  static constexpr int kCopies = 128 / sizeof(Entry);
  static constexpr int kLog2 = 7;  // bytes of an entry's copies

 public:
  static constexpr int kBytes = 256 << kLog2;

  __device__ __forceinline__ explicit PairLut(const uint8_t *lut)
      : lane_(lut + threadIdx.x % kCopies * sizeof(Entry)) {}

  // All threads of the CTA call it, each with the pair of byte threadIdx.x.
  static __device__ __forceinline__ void fill(uint8_t *lut, Entry pair) {
    static_assert(kMultistageThreads == 256);
    constexpr int kPer = 16 / sizeof(Entry);
    uint4 vector;
#pragma unroll
    for (int i = 0; i < kPer; ++i) reinterpret_cast<Entry *>(&vector)[i] = pair;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int chunk = (i + threadIdx.x) % 8;  // different banks
      *reinterpret_cast<uint4 *>(lut + (threadIdx.x << kLog2) + chunk * 16) = vector;
    }
  }

  __device__ __forceinline__ Entry pair(uint32_t word, int byte) const {
    const int shift = byte * 8 - kLog2;
    const uint32_t shifted = shift < 0 ? word << -shift : word >> (shift & 31);
    return *reinterpret_cast<const Entry *>(lane_ + (shifted & 0xffu << kLog2));
  }

 private:
  const uint8_t *lane_;
};

// Decodes to entries of the codebook in T. Scales multiply sums.
template <class T>
struct DecodeEntries {
  using Entry = uint32_t;

  // The pair of the byte threadIdx.x, and the unit of entries.
  static __device__ __forceinline__ Entry make(const MultistageArgs &args, float &unit) {
    const uint32_t entry = lane_entry<T>(args.decode.rounded, args.matmul.weight.codebook, unit);
    const uint32_t second = __shfl_sync(0xffffffffu, entry, threadIdx.x % 16, 16);
    const uint32_t first = __shfl_sync(0xffffffffu, entry, threadIdx.x / 16, 16);
    return __byte_perm(first, second, 0x5410);
  }
  static __device__ __forceinline__ uint32_t weights(Entry pair, float) { return pair; }
};

// Decodes to weights in T, as dequantize rounds them.
template <class T>
struct DecodeWeights {
  using Entry = float2;

  static __device__ __forceinline__ Entry make(const MultistageArgs &args, float &unit) {
    unit = 1.0f;
    const float *const callers = args.matmul.weight.codebook;
    const auto entry = [&](int code) {
      return callers != nullptr ? callers[code] : args.decode.exact[code];
    };
    return {entry(threadIdx.x / 16), entry(threadIdx.x % 16)};
  }
  static __device__ __forceinline__ uint32_t weights(Entry pair, float scale) {
    return pack_pair(T{}, multiply_rn(pair.x, scale), multiply_rn(pair.y, scale));
  }
};

template <class T, ScaleOn On>
using DecodeOf = std::conditional_t<On == ScaleOn::kSums, DecodeEntries<T>, DecodeWeights<T>>;

// The scales of this lane's own row, one a K-tile. Those of two K-tiles are finished at a time,
// while the next two are in flight.
class RowScales {
 public:
  using OfTile = float[4];  // the lane's four rows have these in a K-tile
  static constexpr bool kThroughSharedMemory = false;

  // `first_row` is the CTA tile's.
  __device__ __forceinline__ RowScales(const MultistageArgs &args, const uint8_t *tables,
                                       int64_t first_row, int k_tile)
      : args_(args),
        table_(reinterpret_cast<const float *>(tables + kMultistageLutBytes)),
        k_tile_(k_tile) {
    // Past the last row of the weight are copies of it.
    first_ = min(first_row + threadIdx.x, args.matmul.weight.rows - 1) * args.matmul.weight.cols;
    load(k_tile / 2);
  }

  // Waits for the first scales.
  __device__ __forceinline__ void begin() {
    finish();
    load(k_tile_ / 2 + 1);
  }

  // Goes on to the next K-tile, whose scale is multiplied by the factor.
  __device__ __forceinline__ void next(float factor) {
    own_ = (k_tile_ % 2 == 0 ? scales_.x : scales_.y) * factor;
    ++k_tile_;
    if (k_tile_ % 2 == 0) {
      finish();
      load(k_tile_ / 2 + 1);
    }
  }

  // Gets the scales of the K-tile from the lanes that have them.
  __device__ __forceinline__ void share(OfTile &of_row) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      of_row[i] = __shfl_sync(0xffffffffu, own_, threadIdx.x % 32 / 4 * 4 + i);
  }

 private:
  __device__ __forceinline__ bool is_nested() const {
    return args_.matmul.weight.nested_blocksize_log2 >= 0;
  }

  // Starts to load the scales of two K-tiles.
  __device__ __forceinline__ void load(int pair) {
    const WeightView &weight = args_.matmul.weight;
    if (pair * 2 >= args_.schedule.k_tiles) return;
    if (!args_.scale_pairs) return load_each(pair);
    const int64_t block = first_ / kMultistageTileK + pair * 2;
    if (!is_nested()) {
      absmax_ =
          *reinterpret_cast<const float2 *>(static_cast<const float *>(weight.absmax) + block);
      return;
    }
    codes_ =
        *reinterpret_cast<const uint16_t *>(static_cast<const uint8_t *>(weight.absmax) + block);
    absmax_.x = absmax_.y = weight.nested_absmax[block >> weight.nested_blocksize_log2];
  }
  __device__ __forceinline__ void load_each(int pair) {
    codes_ = 0;
    absmax_.x = load_one(pair * 2, 0);
    absmax_.y = pair * 2 + 1 < args_.schedule.k_tiles ? load_one(pair * 2 + 1, 8) : 0;
  }
  __device__ __forceinline__ float load_one(int k_tile, int shift) {
    const WeightView &weight = args_.matmul.weight;
    const int64_t block = (first_ + k_tile * kMultistageTileK) >> weight.blocksize_log2;
    if (!is_nested()) return static_cast<const float *>(weight.absmax)[block];
    codes_ |= uint32_t{static_cast<const uint8_t *>(weight.absmax)[block]} << shift;
    return weight.nested_absmax[block >> weight.nested_blocksize_log2];
  }

  __device__ __forceinline__ void finish() {
    scales_ = absmax_;
    if (!is_nested()) return;
    const float offset = *args_.matmul.weight.nested_offset;
    scales_.x = nested_scale(table_[codes_ & 255u], absmax_.x, offset);
    scales_.y = nested_scale(table_[codes_ >> 8], absmax_.y, offset);
  }

  const MultistageArgs &args_;
  const float *const table_;
  int64_t first_;  // element of the row
  int k_tile_;
  float own_;        // the scale of the K-tile
  float2 scales_;    // the present two K-tiles
  float2 absmax_{};  // the next two, for finish()
  uint32_t codes_ = 0;
};

// A weight with a codebook, whose tables of pairs and of nested scales are in shared memory.
template <class Arch_, class T, ScaleOn On>
class CodebookWeight {
  using Decode = DecodeOf<T, On>;
  using Lut = PairLut<typename Decode::Entry>;

 public:
  using Arch = Arch_;
  using Args = MultistageArgs;
  using Scales = RowScales;
  using Element = T;
  static constexpr WeightKind kKind = WeightKind::kCodebook;
  static constexpr ScaleOn kScaleOn = On;
  static_assert(Lut::kBytes == kMultistageLutBytes);

  // Fills the tables and returns the factor of all scales. A barrier must follow.
  static __device__ __forceinline__ float fill(const Args &args, uint8_t *shared) {
    float unit;
    Lut::fill(shared, Decode::make(args, unit));
    if (args.matmul.weight.nested_blocksize_log2 >= 0)
      reinterpret_cast<float *>(shared + kMultistageLutBytes)[threadIdx.x] =
          args.matmul.weight.nested_code[threadIdx.x];
    return unit;
  }

  using Loader = RowPackedLoader<Arch>;
  using Words = RowPackedWords;

  __device__ __forceinline__ CodebookWeight(const Args &, const uint8_t *shared) : lut_(shared) {}

  // This is looked up for two k-steps.
  struct Looked {
    typename Decode::Entry pairs[16];
  };

  // Looks up two weights, the step-th of the 16 pairs that the lane has in four rows and eight
  // columns: those of word `half` of row step / 4.
  template <int Half>
  __device__ __forceinline__ void look_up(Looked &to, const Words &words, const Scales::OfTile &,
                                          int step) const {
    to.pairs[step] = lut_.pair(words.word<Half>(step / 4), step % 4);
  }

  // Makes the fragment of byte step % 4 of row step / 4.
  static __device__ __forceinline__ void decode(uint32_t (&a)[2][2][4], const Looked &from,
                                                const Scales::OfTile &scale, int step) {
    const int row = step / 4, byte = step % 4;
    a[byte / 2][row / 2][row % 2 + byte % 2 * 2] = Decode::weights(from.pairs[step], scale[row]);
  }
  static __device__ __forceinline__ float factor(float scale) { return scale; }

  // Scales the sums of a tile of y where a kind of weight has global scales.
  template <int MTiles>
  static __device__ __forceinline__ void scale_sums(const Args &, int64_t,
                                                    float (&)[2][MTiles][4]) {}
  // Adds what the sums of a tile of y lack.
  template <int MTiles>
  static __device__ __forceinline__ void finish_sums(const Args &args, int64_t first_n,
                                                     int64_t first_m, float (&sums)[2][MTiles][4]) {
    add_lora<Arch, T>(args.matmul, first_n, first_m, sums);
  }

 private:
  const Lut lut_;
};

}  // namespace
}  // namespace nf4::cuda
