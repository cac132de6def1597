// y = x W^T for any product on any GPU: tiles of W and x in shared memory, W as dequantize rounds
// it.
//
// A CTA tile is 64 rows of the weight (A) by 64 rows of x (B), in K-tiles of 64 columns; while it
// multiplies one K-tile the loads of the next are in flight. Right for every shape and alignment.
// On GPUs without 16-bit tensor-core products of both dtypes it multiplies in fp32.
//
// Bound by mma.sync's rate at many rows of x, by the latency of a K-tile at few. The experiments
// are in docs/design/matmul-wgmma.md, "The mma kernel".
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/weight/codebooks.cuh"
#include "cuda/weight/scales.cuh"

namespace nf4::cuda {
namespace {

constexpr int kMmaTileK = 64;
constexpr int kVectorK = 16;  // columns that a thread loads
constexpr int kVectorsPerTileK = kMmaTileK / kVectorK;
static_assert(kMmaTileN == kMmaTileM && kMmaThreads == kMmaTileN * kVectorsPerTileK);

// 64 x 64 elements of 16 bits in shared memory, rows of 128 bytes in the 128-byte swizzle: eight
// rows' 16-byte chunks of one column, and one row's eight chunks, are in different banks.
template <class T>
class SmemTile {
 public:
  __device__ __forceinline__ explicit SmemTile(uint4 *chunks) : chunks_(chunks) {}
  __device__ __forceinline__ uint4 &chunk(int row, int index) const {
    return chunks_[row * 8 + (index ^ row % 8)];
  }
  // Two neighbours, the first at an even column.
  __device__ __forceinline__ uint32_t pair(int row, int column) const {
    return reinterpret_cast<const uint32_t *>(&chunk(row, column / 8))[column % 8 / 2];
  }
  __device__ __forceinline__ float element(int row, int column) const {
    return to_float(reinterpret_cast<const T *>(&chunk(row, column / 8))[column % 8]);
  }

 private:
  uint4 *chunks_;
};

// ---- Loads -------------------------------------------------------------------------------

// kVectorK columns of a row of W: codes, and the scales of the first and the last block.
template <class Scales>
struct CodeVector {
  uint32_t words[kVectorK / 8];  // high nibble of the lowest byte first
  typename Scales::Fetched first_scale, last_scale;
  int count;           // of the columns, in the matrix
  int in_first_block;  // of the columns
};

template <class Arch, class Scales>
__device__ __forceinline__ CodeVector<Scales> load_codes(const MatmulArgs &args, int64_t row,
                                                         int64_t column) {
  CodeVector<Scales> vector{};
  if (row >= args.weight.rows || column >= args.weight.cols) return vector;
  const int64_t first = row * args.weight.cols + column;
  vector.count = static_cast<int>(min(args.weight.cols - column, int64_t{kVectorK}));
  const int blocksize = 1 << args.weight.blocksize_log2;
  vector.in_first_block = blocksize - (static_cast<int>(first) & (blocksize - 1));
  vector.first_scale =
      Scales::template fetch<LoadGlobal>(args.weight, first >> args.weight.blocksize_log2);
  vector.last_scale = Scales::template fetch<LoadGlobal>(
      args.weight, (first + vector.count - 1) >> args.weight.blocksize_log2);
  if (args.whole_words) {
    const uint2 v = load_once<Arch>(reinterpret_cast<const uint2 *>(args.weight.packed + first / 2),
                                    evict_normal<Arch>());
    vector.words[0] = v.x;
    vector.words[1] = v.y;
    return vector;
  }
#pragma unroll
  for (int k = 0; k < kVectorK; ++k)
    if (k < vector.count)
      vector.words[k / 8] |= unpack_code(args.weight.packed, first + k) << (4 * (k % 8 ^ 1));
  return vector;
}

template <class T>
__device__ __forceinline__ void load_x(const MatmulArgs &args, int64_t row, int64_t column,
                                       uint4 (&vector)[kVectorK / 8]) {
#pragma unroll
  for (int chunk = 0; chunk < kVectorK / 8; ++chunk) {
    vector[chunk] = {};
    const int64_t k = column + chunk * 8;
    if (row >= args.m || k >= args.weight.cols) continue;
    const T *x = static_cast<const T *>(args.x) + row * args.x_stride + k;
    if (args.x_vectors && k + 8 <= args.weight.cols) {
      vector[chunk] = *reinterpret_cast<const uint4 *>(x);
      continue;
    }
    T elements[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = k + i < args.weight.cols ? x[i] : from_float<T>(0.0f);
    memcpy(&vector[chunk], elements, sizeof elements);
  }
}

// ---- Dequantize --------------------------------------------------------------------------

template <class Scales>
struct WeightStore {
  const ScaleTable<Scales> &table;
  const float *codebook;  // in shared memory

  // Rounded as dequantize rounds; zeros past the end of the row.
  template <class T>
  __device__ __forceinline__ void store(const CodeVector<Scales> &vector, const SmemTile<T> &to,
                                        int row, int chunk) const {
    const float first = Scales::finish(vector.first_scale, table);
    const float last = Scales::finish(vector.last_scale, table);
#pragma unroll
    for (int word = 0; word < kVectorK / 8; ++word) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int k = word * 8 + i;
        const float entry = codebook[vector.words[word] >> (4 * (i ^ 1)) & 15u];
        values[i] =
            k < vector.count ? multiply_rn(entry, k < vector.in_first_block ? first : last) : 0.0f;
      }
      to.chunk(row, chunk + word) = pack_vector<T>(values);
    }
  }
};

// ---- Products ----------------------------------------------------------------------------

// Each of eight warps has 32 x 16 of y.
template <class T>
struct CtaMma {
  float sums[2][2][4] = {};

  __device__ __forceinline__ void add(const SmemTile<T> &w, const SmemTile<T> &x) {
    const int group_id = threadIdx.x % 32 / 4, thread_in_group = threadIdx.x % 4;
    const int row = threadIdx.x / 32 % 2 * 32, m = threadIdx.x / 64 * 16;
#pragma unroll
    for (int k = 0; k < kMmaTileK; k += 16) {
      const int column = k + thread_in_group * 2;
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          a[i][j] = w.pair(row + i * 16 + group_id + j % 2 * 8, column + j / 2 * 8);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t b0 = x.pair(m + n * 8 + group_id, column);
        const uint32_t b1 = x.pair(m + n * 8 + group_id, column + 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma_m16n8k16(T{}, sums[i][n], a[i], b0, b1);
      }
    }
  }

  // Calls visit(row of W, row of x, sum).
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    const int group_id = threadIdx.x % 32 / 4, thread_in_group = threadIdx.x % 4;
    const int row = threadIdx.x / 32 % 2 * 32, m = threadIdx.x / 64 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          visit(row + i * 16 + group_id + k / 2 * 8, m + n * 8 + thread_in_group * 2 + k % 2,
                sums[i][n][k]);
  }
};

// Each thread has 8 x 2 of y, in fp32.
template <class T>
struct CtaFma {
  float sums[8][2] = {};

  __device__ __forceinline__ void add(const SmemTile<T> &w, const SmemTile<T> &x) {
    const int row = threadIdx.x % 8, m = threadIdx.x / 8;
#pragma unroll 4
    for (int k = 0; k < kMmaTileK; ++k) {
      float w_values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) w_values[i] = w.element(row + i * 8, k);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float x_value = x.element(m + j * 32, k);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i][j] = __fmaf_rn(w_values[i], x_value, sums[i][j]);
      }
    }
  }

  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    const int row = threadIdx.x % 8, m = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) visit(row + i * 8, m + j * 32, sums[i][j]);
  }
};

// ---- The kernel --------------------------------------------------------------------------

template <class Arch, class T, class Scales>
__global__ void __launch_bounds__(kMmaThreads) matmul_mma(const __grid_constant__ MatmulArgs args) {
  using Mma = std::conditional_t<Arch::kTensorCores, CtaMma<T>, CtaFma<T>>;
  __shared__ uint4 chunks[2][kMmaTileN * 8];
  __shared__ float scale_code[Scales::kNested ? Scales::kTableSize : 1];
  __shared__ float codebook[kCodebookSize];
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  ScaleTable<Scales> table(scale_code);
  table.template load<LoadGlobal, kMmaThreads>(args.weight);
  if (threadIdx.x < kCodebookSize)
    codebook[threadIdx.x] = device_codebook(args.weight)[threadIdx.x];
  const SmemTile<T> w(chunks[0]), x(chunks[1]);
  const WeightStore<Scales> weight_store{table, codebook};

  const int64_t n_tiles = (args.weight.rows + kMmaTileN - 1) / kMmaTileN;
  const int64_t first_n = blockIdx.x % n_tiles * kMmaTileN;
  const int64_t first_m = blockIdx.x / n_tiles * kMmaTileM;
  const int row = threadIdx.x / kVectorsPerTileK, vector = threadIdx.x % kVectorsPerTileK;

  Mma mma;
  const int64_t own_row = first_n + row;
  CodeVector<Scales> codes = load_codes<Arch, Scales>(args, own_row, vector * kVectorK);
  uint4 values[kVectorK / 8];
  load_x<T>(args, first_m + row, vector * kVectorK, values);
  for (int64_t k = 0; k < args.weight.cols; k += kMmaTileK) {
    const int64_t next = k + kMmaTileK + vector * kVectorK;
    __syncthreads();
    weight_store.store(codes, w, row, vector * (kVectorK / 8));
#pragma unroll
    for (int i = 0; i < kVectorK / 8; ++i) x.chunk(row, vector * (kVectorK / 8) + i) = values[i];
    __syncthreads();
    codes = load_codes<Arch, Scales>(args, own_row, next);
    load_x<T>(args, first_m + row, next, values);
    mma.add(w, x);
  }

  const T *bias = static_cast<const T *>(args.bias);
  T *y = static_cast<T *>(args.y);
  mma.each([&](int i, int j, float sum) {
    const int64_t n = first_n + i, m = first_m + j;
    if (n >= args.weight.rows || m >= args.m) return;
    const float bias_value = bias == nullptr ? 0.0f : to_float(bias[n]);
    y[m * args.y_stride + n] = from_float<T>(sum + bias_value);
  });
}

}  // namespace
}  // namespace nf4::cuda
