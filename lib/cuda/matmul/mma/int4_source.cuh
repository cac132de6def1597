// The mma kernels' source of integer weights: the codes, scales and zero points of a CTA tile. A
// thread has the eight columns of one chunk in two rows. The rows are chosen so that a warp reads
// neighbouring words and writes to different banks.
#pragma once

#include <type_traits>

#include "core/int4.hpp"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/mma/smem_tile.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/weight/int4_scale.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

constexpr int kInt4Rows = 2;  // per thread

// A thread's codes. It walks along K, a K-tile at a time. of(i) returns eight codes of row i along
// K, the first in the low bits.
template <class Arch, nf4_int4_layout Layout>
class Int4WordLoader {
 public:
  static constexpr bool kRowPacked = Layout == NF4_INT4_COMPRESSED_TENSORS;
  static constexpr int kRowStep = 32;  // from row 0 to row 1
  struct Words {
    uint32_t of[kInt4Rows];
  };

  static __device__ __forceinline__ int chunk() { return threadIdx.x / (kRowPacked ? 1 : 32) % 8; }
  static __device__ __forceinline__ int row() { return threadIdx.x / (kRowPacked ? 8 : 1) % 32; }

  __device__ __forceinline__ void seek(const Int4View &weight, int64_t n, int64_t k) {
    const auto word = [&](int64_t row, int64_t column) {
      return int4_code(Layout, weight.rows, weight.cols, row, column).word;
    };
    word_ = weight.packed + word(n, k);
    row_step_ = word(kRowStep, 0);
    tile_step_ = word(0, kMmaTileK);
  }
  // `count` is the number of columns that are in the matrix.
  __device__ __forceinline__ Words load(const bool (&in_rows)[kInt4Rows], int count) {
    Words words{};
#pragma unroll
    for (int i = 0; i < kInt4Rows; ++i)
      if (in_rows[i] && count > 0)
        words.of[i] = load_once<Arch>(word_ + i * row_step_, evict_normal<Arch>());
    word_ += tile_step_;
    return words;
  }
  static __device__ __forceinline__ uint32_t of(const Words &words, int i) { return words.of[i]; }
  __device__ __forceinline__ void skip(int64_t words) { word_ += words; }

 private:
  const uint32_t *word_;
  int64_t row_step_, tile_step_;
};

// A word has eight rows, of which this thread uses q and q + 4; four threads read the same words.
template <class Arch>
class Int4WordLoader<Arch, NF4_INT4_AWQ> {
 public:
  static constexpr int kRowStep = 4;
  struct Words {
    uint32_t of[kInt4PerWord];  // one per column
  };

  static __device__ __forceinline__ int chunk() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int row() { return threadIdx.x % 32 / 4 * 8 + threadIdx.x % 4; }

  __device__ __forceinline__ void seek(const Int4View &weight, int64_t n, int64_t k) {
    word_ = weight.packed + int4_code(NF4_INT4_AWQ, weight.rows, weight.cols, n, k).word;
    column_step_ = weight.rows / kInt4PerWord;
  }
  __device__ __forceinline__ Words load(const bool (&in_rows)[kInt4Rows], int count) {
    Words words{};
    const uint32_t *word = word_;
#pragma unroll
    for (int i = 0; i < kInt4PerWord; ++i, word += column_step_)
      if (in_rows[0] && i < count) words.of[i] = load_once<Arch>(word, evict_normal<Arch>());
    word_ += kMmaTileK * column_step_;
    return words;
  }
  // For neighbouring columns, this thread's codes are in the low nibbles of two bytes of a word.
  static __device__ __forceinline__ uint32_t of(const Words &words, int i) {
    const int shift = awq_nibble(threadIdx.x % 4) * 4;
    uint32_t pairs[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t first = words.of[2 * k] >> shift & 0x0f0fu;
      const uint32_t second = words.of[2 * k + 1] >> shift & 0x0f0fu;
      pairs[k] = first | second << 4;
    }
    const uint32_t selector = i == 0 ? 0x0040 : 0x0051;
    return __byte_perm(__byte_perm(pairs[0], pairs[1], selector),
                       __byte_perm(pairs[2], pairs[3], selector), 0x5410);
  }
  __device__ __forceinline__ void skip(int64_t words) { word_ += words; }

 private:
  const uint32_t *word_;
  int64_t column_step_;
};

// The scales and words of zeros for a thread's chunk: one per row, as all columns of the chunk are
// in one group.
template <nf4_int4_layout Layout>
class Int4GroupScales {
 public:
  static constexpr int kScales = 1;  // per row
  static constexpr int kPrefetch = 2;

  __device__ __forceinline__ void seek(const Int4View &weight, int64_t n, int64_t k) {
    const int64_t group = k < weight.cols ? k / weight.group_size : 0;
    left_ = (group + 1) * weight.group_size - k;
    scale_ = weight.scales + int4_scale(Layout, weight.rows, weight.groups, n, group);
    scale_step_ = int4_scale(Layout, weight.rows, weight.groups, 0, 1);
    zero_ = weight.zeros + int4_zero(Layout, weight.rows, weight.groups, n, group).word;
    zero_step_ = int4_zero(Layout, weight.rows, weight.groups, 0, 1).word;
  }
  __device__ __forceinline__ void find(const Int4View &weight, int count) {
    for (; count > 0 && left_ <= 0; left_ += weight.group_size) {
      scale_ += scale_step_;
      zero_ += zero_step_;
    }
    left_ -= kMmaTileK;
  }
  __device__ __forceinline__ const uint16_t *scale(int) const { return scale_; }
  __device__ __forceinline__ const uint32_t *zero(int) const { return zero_; }
  __device__ __forceinline__ void advance(const Int4View &, int) {}
  __device__ __forceinline__ void skip(int64_t scales, int64_t words_of_zeros) {
    scale_ += scales;
    zero_ += words_of_zeros;
  }

 private:
  const uint16_t *scale_;
  const uint32_t *zero_;
  int64_t scale_step_, zero_step_;
  int64_t left_;  // columns to the end of the group
};

// The same for weights with g_idx, where each column has its own scale and zero. The groups of a
// K-tile are loaded with the scales of the previous one.
template <nf4_int4_layout Layout>
class Int4ColumnScales {
 public:
  static constexpr int kScales = 8;
  static constexpr int kPrefetch = 1;

  __device__ __forceinline__ void seek(const Int4View &weight, int64_t n, int64_t k) {
    scale_ = weight.scales + int4_scale(Layout, weight.rows, weight.groups, n, 0);
    scale_step_ = int4_scale(Layout, weight.rows, weight.groups, 0, 1);
    zero_ = weight.zeros + int4_zero(Layout, weight.rows, weight.groups, n, 0).word;
    zero_step_ = int4_zero(Layout, weight.rows, weight.groups, 0, 1).word;
    g_idx_ = weight.g_idx + k;
    advance(weight, static_cast<int>(min(weight.cols - k, int64_t{8})));
  }
  __device__ __forceinline__ void find(const Int4View &, int) {}
  __device__ __forceinline__ const uint16_t *scale(int i) const {
    return scale_ + groups_[i] * scale_step_;
  }
  __device__ __forceinline__ const uint32_t *zero(int i) const {
    return zero_ + groups_[i] * zero_step_;
  }
  // `count` is the number of the next columns that are in the matrix. Other columns, which are
  // multiplied by 0, use group 0.
  __device__ __forceinline__ void advance(const Int4View &, int count) {
#pragma unroll
    for (int i = 0; i < kScales; ++i) groups_[i] = i < count ? LoadGlobal::load(g_idx_ + i) : 0;
    g_idx_ += kMmaTileK;
  }

 private:
  const uint16_t *scale_;
  const uint32_t *zero_;
  const int32_t *g_idx_;
  int64_t scale_step_, zero_step_;
  uint32_t groups_[kScales];
};

template <class Arch, nf4_int4_layout Layout, bool kByColumn>
class Int4Source {
  using Codes = Int4WordLoader<Arch, Layout>;
  using Scales = std::conditional_t<kByColumn, Int4ColumnScales<Layout>, Int4GroupScales<Layout>>;
  static constexpr int kScales = Scales::kScales;

 public:
  using Args = Int4MatmulArgs;
  static constexpr bool kLdmatrix = true;
  static constexpr int kResidentCtas = 2;  // per multiprocessor, at least
  // It needs no shared memory.
  static constexpr int kScaleCodeSize = 1;
  static constexpr int kCodebookSize = 1;
  static constexpr int kPrefetch = Scales::kPrefetch;  // in K-tiles

  struct Registers {
    typename Codes::Words codes;
    uint16_t scales[kInt4Rows][kScales];
    uint32_t zeros[kInt4Rows][kScales];  // words
    int count;                           // columns that are in the matrix
  };

  __device__ __forceinline__ Int4Source(const Int4MatmulArgs &args, float *, float *)
      : weight_(args.weight) {}

  // This thread's first row and column in a tile.
  static __device__ __forceinline__ int tile_row() { return Codes::row(); }
  static __device__ __forceinline__ int tile_column() { return Codes::chunk() * 8; }

  // Selects an expert in a stack of such weights, without g_idx.
  __device__ __forceinline__ void select_expert(int expert) { expert_ = expert; }

  // Loads begin at this row and column; each load advances by a K-tile.
  __device__ __forceinline__ void seek(int64_t row, int64_t column) {
    codes_.seek(weight_, row, column);
    scales_.seek(weight_, row, column);
    if constexpr (!kByColumn) {
      codes_.skip(expert_ * int4_packed_words(Layout, weight_.rows, weight_.cols));
      scales_.skip(expert_ * weight_.rows * weight_.groups,
                   expert_ * int4_zero_words(weight_.rows, weight_.groups));
    }
    left_ = weight_.cols - column;
#pragma unroll
    for (int i = 0; i < kInt4Rows; ++i) in_rows_[i] = row + i * Codes::kRowStep < weight_.rows;
    scale_row_step_ = int4_scale(Layout, weight_.rows, weight_.groups, Codes::kRowStep, 0);
    zero_row_step_ = Codes::kRowStep % 8 != 0
                         ? 0
                         : int4_zero(Layout, weight_.rows, weight_.groups, Codes::kRowStep, 0).word;
  }
  __device__ __forceinline__ Registers load(int64_t, int64_t) {
    Registers registers{};
    registers.count = static_cast<int>(min(left_, int64_t{8}));
    registers.codes = codes_.load(in_rows_, registers.count);
    scales_.find(weight_, registers.count);
#pragma unroll
    for (int i = 0; i < kInt4Rows; ++i) {
      if (!in_rows_[i] || registers.count <= 0) continue;
#pragma unroll
      for (int j = 0; j < kScales; ++j) {
        registers.scales[i][j] = LoadGlobal::load(scales_.scale(j) + i * scale_row_step_);
        if (weight_.zeros != nullptr)
          registers.zeros[i][j] = LoadGlobal::load(scales_.zero(j) + i * zero_row_step_);
      }
    }
    left_ -= kMmaTileK;
    scales_.advance(weight_, static_cast<int>(min(left_, int64_t{8})));
    return registers;
  }

  // Stores the weights as dequantize rounds them, with zeros past the last row and column.
  template <class T>
  __device__ __forceinline__ void store(const Registers &registers, const SmemTile<T> &to) const {
    uint32_t bias;
    asm("mov.b32 %0, %1;" : "=r"(bias) : "n"(kBias));
#pragma unroll
    for (int i = 0; i < kInt4Rows; ++i) {
      const int row = Codes::row() + i * Codes::kRowStep;
      const uint32_t codes = Codes::of(registers.codes, i);
      float values[8];
#pragma unroll
      for (int j = 0; j < kScales; ++j) {
        const float scale = scale_to_float(weight_.fp16_scales, registers.scales[i][j]);
        const float zero = zero_of(registers.zeros[i][j], row);
#pragma unroll
        for (int k = j * (8 / kScales); k < (j + 1) * (8 / kScales); ++k)
          values[k] = multiply_rn(biased_code(codes >> 4 * k, bias) - zero, scale);
      }
      // Past the end of the row x is 0, and 0 times an infinity would not be 0.
      if (Layout != NF4_INT4_GPTQ && registers.count < 8)
#pragma unroll
        for (int k = 0; k < 8; ++k)
          if (k >= registers.count) values[k] = 0.0f;
      to.chunk(row, Codes::chunk()) = pack_vector<T>(values);
    }
  }

 private:
  static constexpr uint32_t kBias = 0x4b000000u;  // 2^23, to whose bits an integer is added
  static __device__ __forceinline__ float biased(uint32_t integer) {
    return __uint_as_float(kBias | integer);
  }
  // Handles the low nibble in one instruction; one of two constants has to be in a register.
  static __device__ __forceinline__ float biased_code(uint32_t codes, uint32_t bias) {
    uint32_t bits;
    asm("lop3.b32 %0, %1, 15, %2, 0xea;" : "=r"(bits) : "r"(codes), "r"(bias));
    return __uint_as_float(bits);
  }
  // Returns the biased zero point. The shift of a row is that of row % 8, as tiles begin at
  // multiples of 8.
  __device__ __forceinline__ float zero_of(uint32_t word, int row) const {
    if (weight_.zeros == nullptr) return biased(kInt4SymmetricZero);
    const int shift = int4_zero(Layout, 8, 1, row % 8, 0).shift;
    return biased(int4_zero_word(word, weight_.zero_offset) >> shift & 15u);
  }

  const Int4View &weight_;
  Codes codes_;
  Scales scales_;
  int64_t scale_row_step_, zero_row_step_;
  int64_t left_;  // columns from the next load on
  bool in_rows_[kInt4Rows];
  int64_t expert_ = 0;
};

}  // namespace
}  // namespace nf4::cuda
