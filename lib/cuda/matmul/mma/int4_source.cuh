// The mma kernel's weights of integers: codes, scales and zero points of a CTA tile. A thread has
// the eight columns of one chunk in two rows; which rows they are lets a warp read neighbouring
// words and write to different banks.
#pragma once

#include "core/int4.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/mma/smem_tile.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

constexpr int kInt4Rows = 2;  // of a thread

// Where a thread's codes lie. Codes::of(row) are eight along K, the first in the low bits.
template <class Arch, nf4_int4_layout Layout>
struct Int4Codes {
  static constexpr bool kRowPacked = Layout == NF4_INT4_COMPRESSED_TENSORS;
  uint32_t words[kInt4Rows];

  static __device__ __forceinline__ int chunk() { return threadIdx.x / (kRowPacked ? 1 : 32) % 8; }
  static constexpr int kRowStep = 32;
  static __device__ __forceinline__ int row() { return threadIdx.x / (kRowPacked ? 8 : 1) % 32; }

  __device__ __forceinline__ void load(const Int4View &weight, int64_t n, int64_t k) {
#pragma unroll
    for (int i = 0; i < kInt4Rows; ++i) {
      const int64_t row = n + i * kRowStep;
      words[i] = 0;
      if (row < weight.rows && k < weight.cols)
        words[i] = load_once<Arch>(
            weight.packed + int4_code(Layout, weight.rows, weight.cols, row, k).word,
            evict_normal<Arch>());
    }
  }
  __device__ __forceinline__ uint32_t of(int i) const { return words[i]; }
};

// A word has eight rows, of which this thread takes q and q + 4; four threads read the same words.
template <class Arch>
struct Int4Codes<Arch, NF4_INT4_AWQ> {
  uint32_t words[kInt4PerWord];  // of columns k to k + 7

  static __device__ __forceinline__ int chunk() { return threadIdx.x / 32; }
  static constexpr int kRowStep = 4;
  static __device__ __forceinline__ int row() { return threadIdx.x % 32 / 4 * 8 + threadIdx.x % 4; }

  __device__ __forceinline__ void load(const Int4View &weight, int64_t n, int64_t k) {
    const uint32_t *const word =
        weight.packed + int4_code(NF4_INT4_AWQ, weight.rows, weight.cols, n, k).word;
#pragma unroll
    for (int i = 0; i < kInt4PerWord; ++i) {
      words[i] = 0;
      if (n < weight.rows && k + i < weight.cols)
        words[i] = load_once<Arch>(word + i * (weight.rows / kInt4PerWord), evict_normal<Arch>());
    }
  }
  __device__ __forceinline__ uint32_t of(int i) const {
    const int shift = awq_nibble(threadIdx.x % 4 + i * 4) * 4;
    uint32_t codes = 0;
#pragma unroll
    for (int k = 0; k < kInt4PerWord; ++k) codes |= (words[k] >> shift & 15u) << 4 * k;
    return codes;
  }
};

// Of so many columns together: eight share a scale, or each has its own, by g_idx.
template <bool kByColumn>
constexpr int kInt4ScaleColumns = kByColumn ? 1 : 8;

template <class Arch, nf4_int4_layout Layout, bool kByColumn>
class Int4Source {
 public:
  using View = Int4View;
  using Codes = Int4Codes<Arch, Layout>;
  // In shared memory: none.
  static constexpr int kScaleCodeSize = 1;
  static constexpr int kCodebookSize = 1;

  static constexpr int kPrefetch = kByColumn ? 1 : 2;               // K-tiles
  static constexpr int kScales = 8 / kInt4ScaleColumns<kByColumn>;  // of a chunk's row
  struct Registers {
    Codes codes;
    uint16_t scales[kInt4Rows][kScales];
    uint32_t zeros[kInt4Rows][kScales];  // words
    int count;                           // of the columns, in the matrix
  };

  __device__ __forceinline__ Int4Source(const Int4MatmulArgs &args, float *, float *)
      : weight_(args.weight), group_(0), group_end_(weight_.group_size) {}

  // Before loads that do not begin at the first K-tile.
  __device__ __forceinline__ void seek(int64_t column) {
    if (kByColumn || column >= weight_.cols) return;
    group_ = column / weight_.group_size;
    group_end_ = (group_ + 1) * weight_.group_size;
  }

  // This thread's first row and column in a tile. Loads are in the order of columns.
  static __device__ __forceinline__ int tile_row() { return Codes::row(); }
  static __device__ __forceinline__ int tile_column() { return Codes::chunk() * 8; }

  __device__ __forceinline__ Registers load(int64_t row, int64_t column) {
    Registers registers{};
    registers.count = static_cast<int>(min(weight_.cols - column, int64_t{8}));
    registers.codes.load(weight_, row, column);
    int64_t groups[kScales];
    find_groups(groups, column);
#pragma unroll
    for (int i = 0; i < kInt4Rows; ++i) {
      const int64_t n = row + i * Codes::kRowStep;
      if (n >= weight_.rows || column >= weight_.cols) continue;
#pragma unroll
      for (int j = 0; j < kScales; ++j) {
        registers.scales[i][j] = LoadGlobal::load(
            weight_.scales + int4_scale(Layout, weight_.rows, weight_.groups, n, groups[j]));
        if (weight_.zeros != nullptr)
          registers.zeros[i][j] = LoadGlobal::load(
              weight_.zeros + int4_zero(Layout, weight_.rows, weight_.groups, n, groups[j]).word);
      }
    }
    return registers;
  }

  // Rounded as dequantize rounds; zeros past the last row and chunk.
  template <class T>
  __device__ __forceinline__ void store(const Registers &registers, const SmemTile<T> &to) const {
#pragma unroll
    for (int i = 0; i < kInt4Rows; ++i) {
      const int row = Codes::row() + i * Codes::kRowStep;
      const uint32_t codes = registers.codes.of(i);
      float values[8];
#pragma unroll
      for (int j = 0; j < kScales; ++j) {
        const float scale = scale_of(registers.scales[i][j]);
        const float zero = kBias + zero_of(registers.zeros[i][j], row);
#pragma unroll
        for (int k = 0; k < kInt4ScaleColumns<kByColumn>; ++k) {
          const int column = j * kInt4ScaleColumns<kByColumn> + k;
          const float biased = __uint_as_float(kBiasBits | (codes >> 4 * column & 15u));
          values[column] = multiply_rn(biased - zero, scale);
        }
      }
      // Past the end of the row x is 0, whose product with an infinity would not be.
      if (Layout != NF4_INT4_GPTQ && registers.count < 8)
#pragma unroll
        for (int k = 0; k < 8; ++k)
          if (k >= registers.count) values[k] = 0.0f;
      to.chunk(row, Codes::chunk()) = pack_vector<T>(values);
    }
  }

 private:
  // 2^23, of which an integer below 2^23 is added to by bits.
  static constexpr float kBias = 0x1p23f;
  static constexpr uint32_t kBiasBits = 0x4b000000u;

  // Of the columns of a chunk. Columns past the last, which are multiplied by 0, are in group 0.
  __device__ __forceinline__ void find_groups(int64_t (&groups)[kScales], int64_t column) {
    if constexpr (kByColumn) {
#pragma unroll
      for (int j = 0; j < kScales; ++j)
        groups[j] = column + j < weight_.cols ? LoadGlobal::load(weight_.g_idx + column + j) : 0;
    } else {
      while (column < weight_.cols && column >= group_end_) {
        ++group_;
        group_end_ += weight_.group_size;
      }
      groups[0] = group_;
    }
  }

  __device__ __forceinline__ float scale_of(uint16_t bits) const {
    return weight_.fp16_scales ? __half2float(__ushort_as_half(bits))
                               : __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
  __device__ __forceinline__ float zero_of(uint32_t word, int row) const {
    if (weight_.zeros == nullptr) return kInt4SymmetricZero;
    // The shift of a row is that of row % 8, as tiles begin at multiples of 8.
    const uint32_t stored = word >> int4_zero(Layout, 8, 1, row % 8, 0).shift & 15u;
    return static_cast<float>(int4_zero_point(stored, weight_.zero_offset));
  }

  const Int4View &weight_;
  int64_t group_, group_end_;  // of the last load, unless kByColumn
};

}  // namespace
}  // namespace nf4::cuda
