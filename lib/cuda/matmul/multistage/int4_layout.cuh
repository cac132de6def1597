// The layouts of integer weights for the multistage kernels: the copies of a K-tile, and the words
// of it that a lane decodes. A lane has four rows of its warp and columns 16t to 16t + 15, in
// halves of eight. start_decode brings the codes of two neighbouring columns to bytes 0 and 2 of a
// register, where Nibbles (int4_decode.cuh) finds them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/matmul/multistage/row_packed.cuh"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/weight/int4_decode.cuh"
#include "nf4/nf4.h"

namespace nf4::cuda {
namespace {

// Nibbles that start_decode has brought to their bytes.
template <class Nibbles>
struct InPlace : Nibbles {
  __device__ __forceinline__ uint32_t bytes(uint32_t codes) const { return codes; }
};

// Rows 4g to 4g + 3, which are the lane's own rows in y, too.
struct NeighbouringRows {
  static __device__ __forceinline__ int row(int i) { return threadIdx.x % 32 / 4 * 4 + i; }
  template <int MTiles>
  static __device__ __forceinline__ void order_rows(float (&)[2][MTiles][4]) {}
};

// compressed-tensors: [n][k / 8] words.
struct MultistageRowPacked : NeighbouringRows {
  static constexpr nf4_int4_layout kLayout = NF4_INT4_COMPRESSED_TENSORS;
  template <class T>
  using Nibbles = InPlace<NibblesOfByte<T>>;
  template <class Arch>
  using Loader = RowPackedLoader<Arch>;
  using Words = RowPackedWords;

  template <int Half>
  static __device__ __forceinline__ uint32_t start_decode(const Words &words, int row, int byte) {
    return __byte_perm(words.word<Half>(row), 0, byte * 0x1111);
  }
};

// A thread's copies where neighbours lie along n: two chunks of 16 bytes of a K-tile. Rows past the
// last one are zeros.
class ColumnLoader {
 public:
  static constexpr int kPieces = 2;

  // `from` and `to` are the places of the first chunk. The other one is half a K-tile further, and
  // bit 6 of its place in a stage is flipped. A K-tile of all `rows` has 32 bytes a row.
  __device__ __forceinline__ ColumnLoader(const void *from, int to, bool exists, int64_t rows)
      : from_(static_cast<const uint8_t *>(from)), rows_(rows), to_(to), exists_(exists) {}

  __device__ __forceinline__ void copy(int piece, uint8_t *stage, bool more) const {
    cp_async_16(stage + (to_ ^ piece * 64) + piece * (kMultistageWeightBytes / 2),
                from_ + piece * 16 * rows_, more && exists_ ? 16 : 0);
  }
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void advance() { from_ += 32 * rows_; }

 private:
  const uint8_t *from_;
  const int64_t rows_;
  const int to_;
  const bool exists_;
};

// GPTQ: [k / 8][n] words. A stage has eight rows of words, 128 bytes a warp. Each two rows have
// their chunks in another order, so that the eight lanes that load at a time read from different
// banks.
struct MultistageGptq : NeighbouringRows {
  static constexpr nf4_int4_layout kLayout = NF4_INT4_GPTQ;
  template <class T>
  using Nibbles = InPlace<NibblesOfByte<T>>;
  static constexpr int kWordRows = kMultistageTileK / 8;
  static constexpr int kWordRowBytes = kMultistageTileN * 4;

  struct Words {
    uint4 of[2];
  };
  class Stages : public ColumnLoader {
   public:
    template <class Args>
    __device__ __forceinline__ Stages(const Args &args, int64_t first_n, int k_tile)
        : ColumnLoader(place(args, first_n, k_tile), to(),
                       first_n + threadIdx.x % 64 * 4 < args.matmul.weight.rows,
                       args.matmul.weight.rows) {}

    // Loads the words of the next K-tile from its stage.
    __device__ __forceinline__ void load(Words &words, const uint8_t *stage, bool) const {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        words.of[half] = *reinterpret_cast<const uint4 *>(stage + words_ + half * kWordRowBytes);
    }

   private:
    template <class Args>
    static __device__ __forceinline__ const void *place(const Args &args, int64_t first_n,
                                                        int k_tile) {
      const auto &weight = args.matmul.weight;
      const int64_t n = first_n + threadIdx.x % 64 * 4;
      return weight.packed +
             (k_tile * kWordRows + static_cast<int>(threadIdx.x / 64)) * weight.rows +
             (n < weight.rows ? n : 0);
    }
    static __device__ __forceinline__ int to() {
      const int word_row = threadIdx.x / 64, chunk = threadIdx.x % 64;
      return word_row * kWordRowBytes + (chunk ^ (word_row & 6)) * 16;
    }
    // The lane's own words in a stage.
    static __device__ __forceinline__ int words() {
      const int t = threadIdx.x % 4;
      return 2 * t * kWordRowBytes + (static_cast<int>(threadIdx.x / 4) ^ 2 * t) * 16;
    }
    const int words_ = words();
  };
  // Where there is no cp.async, words go from memory to registers. Those of the next K-tile are in
  // flight.
  class Registers {
   public:
    static constexpr int kPieces = 0;

    template <class Args>
    __device__ __forceinline__ Registers(const Args &args, int64_t first_n, int k_tile)
        : rows_(args.matmul.weight.rows) {
      // Past the last row of the weight are copies of the last four.
      const int64_t n = min(first_n + threadIdx.x / 4 * 4, rows_ - 4);
      from_ = args.matmul.weight.packed +
              (k_tile * kWordRows + static_cast<int>(threadIdx.x % 4) * 2) * rows_ + n;
    }
    __device__ __forceinline__ void begin() { start(); }
    __device__ __forceinline__ void advance() const {}
    __device__ __forceinline__ void copy(int, uint8_t *, bool) const {}

    // Returns the words of the next K-tile. If there are `more`, starts to load those after it.
    __device__ __forceinline__ void load(Words &words, const uint8_t *, bool more) {
      words = next_;
      from_ += kWordRows * rows_;
      if (more) start();
    }

   private:
    __device__ __forceinline__ void start() {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        next_.of[half] = *reinterpret_cast<const uint4 *>(from_ + half * rows_);
    }

    const int64_t rows_;
    const uint32_t *from_;
    Words next_;
  };
  template <class Arch>
  using Loader = std::conditional_t<Arch::kTensorCores, Stages, Registers>;

  template <int Half>
  static __device__ __forceinline__ uint32_t start_decode(const Words &words, int row, int byte) {
    const uint4 of = words.of[Half];
    const uint32_t word = row == 0 ? of.x : row == 1 ? of.y : row == 2 ? of.z : of.w;
    return __byte_perm(word, 0, byte * 0x1111);
  }
};

// AWQ: [k][n / 8] words. A stage has 64 rows of 128 bytes, 16 bytes a warp. A transposing ldmatrix
// reads 16 bytes of eight columns, and gives a lane half a word of two neighbouring columns, side
// by side: nibbles of every second row among eight. The eight columns have their chunks in
// different banks.
struct MultistageAwq {
  static constexpr nf4_int4_layout kLayout = NF4_INT4_AWQ;
  template <class T>
  using Nibbles = InPlace<NibblesOfHalves<T>>;
  static constexpr int kColumnBytes = kMultistageTileN / 2;

  struct Words {
    uint32_t of[2][4];  // eight columns, two in each element
  };
  class Stages : public ColumnLoader {
   public:
    template <class Args>
    __device__ __forceinline__ Stages(const Args &args, int64_t first_n, int k_tile)
        : ColumnLoader(place(args, first_n, k_tile), to(),
                       first_n + threadIdx.x % 8 * 32 < args.matmul.weight.rows,
                       args.matmul.weight.rows) {}

    // Loads the words of the next K-tile from its stage.
    __device__ __forceinline__ void load(Words &words, const uint8_t *stage, bool) const {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ldmatrix_x4_trans(words.of[half], stage + words_ + half * 8 * kColumnBytes);
    }

   private:
    template <class Args>
    static __device__ __forceinline__ const void *place(const Args &args, int64_t first_n,
                                                        int k_tile) {
      const auto &weight = args.matmul.weight;
      const int64_t n = first_n + threadIdx.x % 8 * 32;
      return weight.packed +
             (k_tile * kMultistageTileK + static_cast<int>(threadIdx.x / 8)) * (weight.rows / 8) +
             (n < weight.rows ? n : 0) / 8;
    }
    static __device__ __forceinline__ int to() {
      const int column = threadIdx.x / 8, chunk = threadIdx.x % 8;
      return column * kColumnBytes + (chunk ^ column / 16 * 2 + column % 2) * 16;
    }
    // Where this lane's row of ldmatrix is: row j of matrix i is column 2i + j % 2 of lanes j / 2.
    static __device__ __forceinline__ int words() {
      const int warp = threadIdx.x / 32, i = threadIdx.x % 32 / 8, j = threadIdx.x % 8;
      return (j / 2 * 16 + i * 2 + j % 2) * kColumnBytes + (warp ^ j) * 16;
    }
    const int words_ = words();
  };
  template <class Arch>
  using Loader = Stages;

  // Nibble `row` of the half words.
  template <int Half>
  static __device__ __forceinline__ uint32_t start_decode(const Words &words, int row, int byte) {
    const uint32_t both = words.of[Half][byte];
    return row < 2 ? both : both >> 8;
  }

  // Even lanes along n have rows 0, 2, 4 and 6 of eight, and odd lanes the others.
  static __device__ __forceinline__ int row(int i) {
    const int g = threadIdx.x % 32 / 4;
    return g / 2 * 8 + g % 2 + i * 2;
  }
  // Exchanges sums with the other lane of eight rows, so that each has four neighbours.
  template <int MTiles>
  static __device__ __forceinline__ void order_rows(float (&sums)[2][MTiles][4]) {
    const bool odd = threadIdx.x / 4 % 2 != 0;
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float &a = sums[0][m][j], &b = sums[0][m][j + 2], &c = sums[1][m][j],
              &d = sums[1][m][j + 2];
        const float first = __shfl_xor_sync(0xffffffffu, odd ? a : c, 4);
        const float second = __shfl_xor_sync(0xffffffffu, odd ? b : d, 4);
        const float own_first = odd ? c : a, own_second = odd ? d : b;
        a = odd ? first : own_first;
        b = odd ? own_first : first;
        c = odd ? second : own_second;
        d = odd ? own_second : second;
      }
  }
};

}  // namespace
}  // namespace nf4::cuda
