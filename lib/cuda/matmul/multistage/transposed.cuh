// W^T of a weight with a codebook, for the multistage kernels. The gradient dX = dY W is the
// product of dY with W^T. Rows of W^T are stored columns, and the reduction runs along stored rows.
//
// A byte has two rows of W^T at one column, where operand A takes two columns of one row. Weights
// are packed from fp32, a conversion of any two numbers, so the exchange costs nothing: a lane
// looks up the bytes of two columns, multiplies each by its column's scale, and packs first with
// first and second with second. A transposing ldmatrix gives it both bytes of both columns, in the
// order of columns of x_stage.cuh.
#pragma once

#include <cstdint>

#include "cuda/matmul/multistage/codebook.cuh"
#include "cuda/matmul/multistage/tile.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

// This is the place of scales in shared memory. Each of two buffers has those of a K-tile, of its
// 64 columns for each of the four blocks of 64 rows of a CTA tile. A lane reads four columns at
// once. A quarter of a block has the quads of the four lanes that read together. The blocks differ
// in the order of these quads, so that the lanes that store together write to different banks.
class ColumnScaleStage {
 public:
  static constexpr int kBuffers = 2;
  static constexpr int kBufferBytes = kMultistageTileN * 4;
  static_assert(kBuffers * kBufferBytes == kMultistageColumnScaleBytes);

  // Returns the offset in floats of a block's column.
  static __device__ __forceinline__ int offset(int block, int column) {
    const int quad = column % 16 / 4, lane = column / 16 ^ block;
    return block * kMultistageTileK + quad * 16 + lane * 4 + column % 4;
  }
};

// A thread has the scale of one column and block of each K-tile, and stores it to ColumnScaleStage.
// The scales of two K-tiles are finished at a time, while the next two are in flight.
class ColumnScales {
 public:
  // This points to the first of a lane's four quads in a K-tile, which are 16 floats apart.
  using OfTile = const float *;
  static constexpr bool kThroughSharedMemory = true;

  __device__ __forceinline__ ColumnScales(const MultistageArgs &args, uint8_t *tables,
                                          int64_t first_row, int k_tile)
      : args_(args),
        table_(reinterpret_cast<float *>(tables + kMultistageLutBytes)),
        left_(args.schedule.k_tiles - k_tile) {
    const WeightView &weight = args.matmul.weight;
    const int block = threadIdx.x % kBlocks, column = threadIdx.x / kBlocks;
    // Past the last row of W^T the scales are those of its last block.
    const int64_t row = min(first_row + block * kMultistageTileK, weight.rows - kMultistageTileK);
    const int64_t stored = int64_t{k_tile} * kMultistageTileK + column;
    block_ = static_cast<int>((stored * weight.rows + row) >> weight.blocksize_log2);
    load();
  }

  // Waits for the first scales.
  __device__ __forceinline__ void begin() {
    finish();
    load();
  }

  // Stores the scale of the next K-tile. A barrier must follow before the CTA reads it, and another
  // one before the next call but one.
  __device__ __forceinline__ void next(float) {
    const int block = threadIdx.x % kBlocks, column = threadIdx.x / kBlocks;
    float *const to = stage() + ColumnScaleStage::offset(block, column);
    if (!second_) {
      *to = scales_.x;
    } else {
      to[kBufferFloats] = scales_.y;
      finish();
      load();
    }
    second_ = !second_;
  }

  // Finds the scales of this lane's rows, which next() has stored.
  __device__ __forceinline__ void share(OfTile &of_tile) const {
    const int block = threadIdx.x / 64, lane = threadIdx.x % 4;
    of_tile = stage() + ColumnScaleStage::offset(block, lane * 16) + (second_ ? 0 : kBufferFloats);
  }

 private:
  static constexpr int kBlocks = kMultistageTileN / kMultistageTileK;
  static constexpr int kBufferFloats = ColumnScaleStage::kBufferBytes / 4;
  static_assert(kBlocks * kMultistageTileK == kMultistageThreads);

  __device__ __forceinline__ bool is_nested() const {
    return args_.matmul.weight.nested_blocksize_log2 >= 0;
  }
  // The stage lies behind the table.
  __device__ __forceinline__ float *stage() const { return table_ + kMultistageCodeBytes / 4; }

  // Starts to load the scales of the next two K-tiles. The columns of one are whole blocks, as rows
  // are multiples of 64 and a block has 4096 weights at most.
  __device__ __forceinline__ void load() {
    const int step = static_cast<int>((args_.matmul.weight.rows * kMultistageTileK) >>
                                      args_.matmul.weight.blocksize_log2);
    if (left_ > 0) load_one(block_, absmax_.x, codes_[0]);
    if (left_ > 1) load_one(block_ + step, absmax_.y, codes_[1]);
    block_ += 2 * step;
    left_ -= 2;
  }
  __device__ __forceinline__ void load_one(int block, float &absmax, uint32_t &code) const {
    const WeightView &weight = args_.matmul.weight;
    if (!is_nested()) {
      absmax = static_cast<const float *>(weight.absmax)[block];
      return;
    }
    code = static_cast<const uint8_t *>(weight.absmax)[block];
    absmax = weight.nested_absmax[block >> weight.nested_blocksize_log2];
  }

  __device__ __forceinline__ void finish() {
    scales_ = absmax_;
    if (!is_nested()) return;
    const float offset = *args_.matmul.weight.nested_offset;
    scales_.x = nested_scale(table_[codes_[0]], absmax_.x, offset);
    scales_.y = nested_scale(table_[codes_[1]], absmax_.y, offset);
  }

  const MultistageArgs &args_;
  float *const table_;
  int left_;             // K-tiles to load
  int block_;            // the block of the next K-tile
  bool second_ = false;  // the next K-tile is the second of its two
  float2 scales_;        // the present two K-tiles
  float2 absmax_{};      // the next two, for finish()
  uint32_t codes_[2] = {};
};

// A lane has the codes of four rows and 16 columns. A word has those of two columns.
struct ColumnWords {
  uint32_t of[2][4];
};

// A thread copies the codes of 32 rows of W^T and two columns of each K-tile. A column has 128
// bytes. The order of its chunks differs among the eight columns that an ldmatrix reads together.
class TransposedLoader {
  static constexpr int kChunks = kMultistageTileN / 32;
  static constexpr int kColumnBytes = kChunks * 16;
  static constexpr int kStep = 8;  // columns from one piece to the next

 public:
  static constexpr int kPieces = 2;
  static_assert(kPieces * kMultistageThreads / kChunks == kMultistageTileK);

  static __device__ __forceinline__ int place(int column, int chunk) {
    return column * kColumnBytes + (chunk ^ column / 16 * 2 ^ column % 2) * 16;
  }

  __device__ __forceinline__ TransposedLoader(const MultistageArgs &args, int64_t first_row,
                                              int k_tile)
      : column_bytes_(args.matmul.weight.rows / 2) {
    const int chunk = threadIdx.x % kChunks, line = threadIdx.x / kChunks;
    const int column = line / kStep * 2 * kStep + line % kStep;
    const int64_t row = first_row + chunk * 32;
    to_ = place(column, chunk);
    exists_ = row < args.matmul.weight.rows;
    // Rows that do not exist have no address of their own.
    from_ = args.matmul.weight.packed +
            (int64_t{k_tile} * kMultistageTileK + column) * column_bytes_ + (exists_ ? row / 2 : 0);
    // This lane gives ldmatrix the address of row lane % 8 of matrix lane / 8.
    const int lane = threadIdx.x % 32, line_of_matrix = lane % 8;
    words_ = place(line_of_matrix / 2 * 16 + lane / 8 * 2 + line_of_matrix % 2, threadIdx.x / 32);
  }
  __device__ __forceinline__ void begin() const {}

  // Copies a piece of the next K-tile; if not `more`, there is none.
  __device__ __forceinline__ void copy(int piece, uint8_t *stage, bool more) const {
    cp_async_16(stage + to_ + piece * kStep * kColumnBytes, from_ + piece * kStep * column_bytes_,
                more && exists_ ? 16 : 0);
  }
  __device__ __forceinline__ void advance() { from_ += kMultistageTileK * column_bytes_; }

  // Loads the words of the next K-tile from its stage.
  __device__ __forceinline__ void load(ColumnWords &words, const uint8_t *stage, bool) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ldmatrix_x4_trans(words.of[half], stage + words_ + half * 8 * kColumnBytes);
  }

 private:
  const int64_t column_bytes_;
  const uint8_t *from_;
  int to_;
  bool exists_;
  int words_;  // the offset that this lane gives to ldmatrix
};

// This is W^T, whose tables and scales are in shared memory.
template <class Arch_, class T>
class TransposedCodebook {
  using Decode = DecodeWeights<T>;
  using Lut = PairLut<float2>;

 public:
  using Arch = Arch_;
  using Args = MultistageArgs;
  using Words = ColumnWords;
  using Scales = ColumnScales;
  using Loader = TransposedLoader;
  using Element = T;
  static constexpr WeightKind kKind = WeightKind::kTransposed;
  static constexpr ScaleOn kScaleOn = ScaleOn::kWeights;

  static __device__ __forceinline__ float fill(const Args &args, uint8_t *shared) {
    return CodebookWeight<Arch, T, kScaleOn>::fill(args, shared);
  }

  // This is looked up for two k-steps. A pair of columns takes four steps.
  struct Looked {
    float2 pairs[16];
    float4 scales[2];
  };

  __device__ __forceinline__ TransposedCodebook(const Args &, const uint8_t *shared)
      : lut_(shared) {}

  // Looks up two rows of a column, the step-th of the lane's 16 in four rows and eight columns:
  // byte step % 4 / 2 of column step / 4 * 2 + step % 2.
  template <int Half>
  __device__ __forceinline__ void look_up(Looked &to, const Words &words,
                                          const Scales::OfTile &of_tile, int step) const {
    if (step % 8 == 0)
      to.scales[step / 8] = reinterpret_cast<const float4 *>(of_tile)[(Half * 2 + step / 8) * 4];
    to.pairs[step] = lut_.pair(words.of[Half][step / 4], step % 2 * 2 + step % 4 / 2);
  }

  // Makes the fragments of what the step before and this one looked up.
  static __device__ __forceinline__ void decode(uint32_t (&a)[2][2][4], const Looked &from,
                                                const Scales::OfTile &, int step) {
    if (step % 2 == 0) return;
    const int columns = step / 4, rows = step % 4 / 2;
    const float4 four = from.scales[columns / 2];
    const float2 scales = columns % 2 == 0 ? float2{four.x, four.y} : float2{four.z, four.w};
    const float2 first = from.pairs[step - 1], second = from.pairs[step];
    uint32_t *const to = a[columns / 2][rows] + columns % 2 * 2;
    to[0] = pack_pair(T{}, multiply_rn(first.x, scales.x), multiply_rn(second.x, scales.y));
    to[1] = pack_pair(T{}, multiply_rn(first.y, scales.x), multiply_rn(second.y, scales.y));
  }

  template <int MTiles>
  static __device__ __forceinline__ void finish_sums(const Args &args, int64_t first_row,
                                                     int64_t first_m, float (&sums)[2][MTiles][4]) {
    add_lora<Arch, T>(args.matmul, first_row, first_m, sums);
  }

 private:
  const Lut lut_;
};

}  // namespace
}  // namespace nf4::cuda
