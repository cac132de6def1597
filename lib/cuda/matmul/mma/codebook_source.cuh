// The mma kernel's source of NF4 and FP4 weights and their transposes: the codes, scales and
// look-ups of a CTA tile.
#pragma once

#include "cuda/matmul/args.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/mma/smem_tile.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/weight/codebooks.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

template <class Arch, class Scales, bool Transposed = false>
class CodebookSource {
 public:
  using Args = MatmulArgs;  // if Transposed, the rows and columns of the weight are exchanged
  static constexpr bool kLdmatrix = false;
  static constexpr int kResidentCtas = 1;  // per multiprocessor, at least
  // In shared memory, in floats.
  static constexpr int kScaleCodeSize = Scales::kNested ? Scales::kTableSize : 1;
  static constexpr int kCodebookSize = nf4::kCodebookSize;
  static constexpr int kVectorK = 16;  // columns that a thread loads
  static constexpr int kVectorsPerTileK = kMmaTileK / kVectorK;

  // kVectorK columns of a stored row: the codes, and the scales of the first and the last block.
  struct Registers {
    uint32_t words[kVectorK / 8];  // the codes as stored
    typename Scales::Fetched first_scale, last_scale;
    int count;           // columns that are in the matrix
    int in_first_block;  // columns that are in the first block
  };

  // All threads of the CTA call it; a barrier must follow.
  __device__ __forceinline__ CodebookSource(const MatmulArgs &args, float *scale_code,
                                            float *codebook)
      : args_(args), table_(scale_code), codebook_(codebook) {
    table_.template load<LoadGlobal, kMmaThreads>(args.weight);
    if (threadIdx.x < kCodebookSize)
      codebook[threadIdx.x] = device_codebook(args.weight)[threadIdx.x];
  }

  // This thread's row and column in a tile, those at which its vector starts.
  static __device__ __forceinline__ int tile_row() {
    return Transposed ? stored_column() : stored_row();
  }
  static __device__ __forceinline__ int tile_column() {
    return Transposed ? stored_row() : stored_column();
  }

  // Selects an expert in a stack of such weights.
  __device__ __forceinline__ void select_expert(int expert) {
    first_ = expert * args_.weight.rows * args_.weight.cols;
  }
  __device__ __forceinline__ void seek(int64_t, int64_t) {}
  __device__ __forceinline__ Registers load(int64_t row, int64_t column) const {
    return Transposed ? load_stored(column, row) : load_stored(row, column);
  }

  // Stores the weights as dequantize rounds them, with zeros past the end of the row. Rows of the
  // tile are stored rows.
  template <class T>
  __device__ __forceinline__ void store(const Registers &registers, const SmemTile<T> &to) const {
    const float first = Scales::finish(registers.first_scale, table_);
    const float last = Scales::finish(registers.last_scale, table_);
#pragma unroll
    for (int word = 0; word < kVectorK / 8; ++word) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int k = word * 8 + i;
        const float entry = codebook_[registers.words[word] >> shift(i) & 15u];
        values[i] = k < registers.count
                        ? multiply_rn(entry, k < registers.in_first_block ? first : last)
                        : 0.0f;
      }
      to.store(stored_row(), stored_column() / 8 + word, values);
    }
  }

 private:
  // The place of a column's code in its word.
  static constexpr __device__ int shift(int column) {
    return 4 * (column % 8 ^ (Scales::kLowNibbleFirst ? 0 : 1));
  }
  static __device__ __forceinline__ int stored_row() { return threadIdx.x / kVectorsPerTileK; }
  static __device__ __forceinline__ int stored_column() {
    return threadIdx.x % kVectorsPerTileK * kVectorK;
  }

  // The rows and columns of the stored matrix.
  __device__ __forceinline__ const int64_t &stored_rows() const {
    return Transposed ? args_.weight.cols : args_.weight.rows;
  }
  __device__ __forceinline__ const int64_t &stored_cols() const {
    return Transposed ? args_.weight.rows : args_.weight.cols;
  }
  __device__ __forceinline__ Registers load_stored(int64_t row, int64_t column) const {
    Registers registers{};
    if (row >= stored_rows() || column >= stored_cols()) return registers;
    const int64_t first = first_ + row * stored_cols() + column;
    registers.count = static_cast<int>(min(stored_cols() - column, int64_t{kVectorK}));
    const int blocksize = 1 << args_.weight.blocksize_log2;
    registers.in_first_block = blocksize - (static_cast<int>(first) & (blocksize - 1));
    registers.first_scale =
        Scales::template fetch<LoadGlobal>(args_.weight, first >> args_.weight.blocksize_log2);
    registers.last_scale = Scales::template fetch<LoadGlobal>(
        args_.weight, (first + registers.count - 1) >> args_.weight.blocksize_log2);
    if (args_.whole_words) {
      const uint2 v = load_once<Arch>(
          reinterpret_cast<const uint2 *>(args_.weight.packed + first / 2), evict_normal<Arch>());
      registers.words[0] = v.x;
      registers.words[1] = v.y;
      return registers;
    }
#pragma unroll
    for (int i = 0; i < kVectorK; ++i)
      if (i < registers.count)
        registers.words[i / 8] |=
            unpack_code(args_.weight.packed, first + i, Scales::kLowNibbleFirst) << shift(i);
    return registers;
  }

  const MatmulArgs &args_;
  ScaleTable<Scales> table_;
  const float *codebook_;
  int64_t first_ = 0;  // first element of the weight
};

}  // namespace
}  // namespace nf4::cuda
