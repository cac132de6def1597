// y = x W^T for any problem: tiles of W and x in shared memory, W as dequantize would make it.
//
// The baseline: right for every shape, alignment and GPU. A thread block makes 64 x 64 of y
// in steps of 64 columns; while it multiplies one step, the loads of the next are in flight.
// What bounds it at many rows of x is the rate of mma.sync; at few, the latency of a step.
// On GPUs without 16-bit tensor-core products of both dtypes it multiplies in fp32.
//
// Log, 14336x4096 bf16 nested on an H200, M = 64: 212 us with 128 threads that each decode 32
// columns of a step and fetch their scales when they need them, 133 with 256 threads, 16
// columns, and scales fetched a step ahead.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/scales.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/weight/codebooks.cuh"

namespace nf4::cuda {
namespace {

constexpr int kStep = 64;  // columns
constexpr int kRun = 16;   // of them, what a thread loads
constexpr int kRunsPerStep = kStep / kRun;
static_assert(kTiledRows == kTiledM && kTiledThreads == kTiledRows * kRunsPerStep);

// 64 x 64 elements of 16 bits in shared memory, rows of 128 bytes. Pieces of 16 bytes are
// exchanged within a row by the row's number, so that eight rows' pieces of one column, and
// one row's eight pieces, are in different banks.
template <class T>
class SharedTile {
 public:
  __device__ __forceinline__ explicit SharedTile(uint4 *pieces) : pieces_(pieces) {}
  __device__ __forceinline__ uint4 &piece(int row, int index) const {
    return pieces_[row * 8 + (index ^ row % 8)];
  }
  // Two neighbours, the first at an even column.
  __device__ __forceinline__ uint32_t pair(int row, int column) const {
    return reinterpret_cast<const uint32_t *>(&piece(row, column / 8))[column % 8 / 2];
  }
  __device__ __forceinline__ float element(int row, int column) const {
    return to_float(reinterpret_cast<const T *>(&piece(row, column / 8))[column % 8]);
  }

 private:
  uint4 *pieces_;
};

// ---- Loads -------------------------------------------------------------------------------

// kRun columns of a row of W: codes, and the scales of the blocks that they begin and end in.
template <bool Nested>
struct CodeRun {
  uint32_t words[kRun / 8];  // high nibble of the lowest byte first
  FetchedScale<Nested> first_scale, last_scale;
  int count;  // of the columns in the matrix
  int left;   // of the columns in the first block
};

template <class Arch, bool Nested>
__device__ __forceinline__ CodeRun<Nested> load_codes(const MatmulArgs &args, int64_t row,
                                                      int64_t column) {
  CodeRun<Nested> run{};
  if (row >= args.rows || column >= args.cols) return run;
  const int64_t first = row * args.cols + column;
  run.count = static_cast<int>(min(args.cols - column, int64_t{kRun}));
  const int blocksize = 1 << args.blocksize_log2;
  run.left = blocksize - (static_cast<int>(first) & (blocksize - 1));
  run.first_scale = fetch_scale<Nested>(args, first >> args.blocksize_log2);
  run.last_scale = fetch_scale<Nested>(args, (first + run.count - 1) >> args.blocksize_log2);
  if (args.whole_runs) {
    const uint2 v = load_once<Arch>(reinterpret_cast<const uint2 *>(args.packed + first / 2),
                                    evict_normal<Arch>());
    run.words[0] = v.x;
    run.words[1] = v.y;
    return run;
  }
#pragma unroll
  for (int k = 0; k < kRun; ++k)
    if (k < run.count) run.words[k / 8] |= unpack_code(args.packed, first + k) << (4 * (k % 8 ^ 1));
  return run;
}

template <class T>
__device__ __forceinline__ void load_x_run(const MatmulArgs &args, int64_t row, int64_t column,
                                           uint4 (&run)[kRun / 8]) {
#pragma unroll
  for (int piece = 0; piece < kRun / 8; ++piece) {
    run[piece] = {};
    const int64_t k = column + piece * 8;
    if (row >= args.m || k >= args.cols) continue;
    const T *x = static_cast<const T *>(args.x) + row * args.x_stride + k;
    if (args.x_vectors && k + 8 <= args.cols) {
      run[piece] = *reinterpret_cast<const uint4 *>(x);
      continue;
    }
    T elements[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = k + i < args.cols ? x[i] : from_float<T>(0.0f);
    memcpy(&run[piece], elements, sizeof elements);
  }
}

// ---- Codes to numbers --------------------------------------------------------------------

template <bool Nested>
struct Dequantizer {
  const float *code;      // shared
  const float *codebook;  // shared, 16
  float offset;

  // As dequantize rounds them; zeros past the end of the row.
  template <class T>
  __device__ __forceinline__ void store(const CodeRun<Nested> &run, const SharedTile<T> &to,
                                        int row, int piece) const {
    const float first = finish_scale(run.first_scale, code, offset);
    const float last = finish_scale(run.last_scale, code, offset);
#pragma unroll
    for (int word = 0; word < kRun / 8; ++word) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int k = word * 8 + i;
        const float entry = codebook[run.words[word] >> (4 * (i ^ 1)) & 15u];
        values[i] = k < run.count ? multiply_rn(entry, k < run.left ? first : last) : 0.0f;
      }
      to.piece(row, piece + word) = pack_vector<T>(values);
    }
  }
};

// ---- Products ----------------------------------------------------------------------------

// 32 x 16 of y in each of eight warps, as tensor cores hold it: W is A, x is B.
template <class T>
struct TensorProduct {
  float sums[2][2][4] = {};

  __device__ __forceinline__ void add(const SharedTile<T> &w, const SharedTile<T> &x) {
    const int group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
    const int row = threadIdx.x / 32 % 2 * 32, of_x = threadIdx.x / 64 * 16;
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      const int column = k + member * 2;
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          a[i][j] = w.pair(row + i * 16 + group + j % 2 * 8, column + j / 2 * 8);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t b0 = x.pair(of_x + n * 8 + group, column);
        const uint32_t b1 = x.pair(of_x + n * 8 + group, column + 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma_m16n8k16(T{}, sums[i][n], a[i], b0, b1);
      }
    }
  }

  // Calls visit(row of W, row of x, sum).
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    const int group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
    const int row = threadIdx.x / 32 % 2 * 32, of_x = threadIdx.x / 64 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          visit(row + i * 16 + group + k / 2 * 8, of_x + n * 8 + member * 2 + k % 2, sums[i][n][k]);
  }
};

// 8 x 2 of y in each thread, in fp32.
template <class T>
struct ScalarProduct {
  float sums[8][2] = {};

  __device__ __forceinline__ void add(const SharedTile<T> &w, const SharedTile<T> &x) {
    const int row = threadIdx.x % 8, of_x = threadIdx.x / 8;
#pragma unroll 4
    for (int k = 0; k < kStep; ++k) {
      float of_w[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) of_w[i] = w.element(row + i * 8, k);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float value = x.element(of_x + j * 32, k);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i][j] = __fmaf_rn(of_w[i], value, sums[i][j]);
      }
    }
  }

  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    const int row = threadIdx.x % 8, of_x = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) visit(row + i * 8, of_x + j * 32, sums[i][j]);
  }
};

// ---- The kernel --------------------------------------------------------------------------

template <class Arch, class T, bool Nested>
__global__ void __launch_bounds__(kTiledThreads)
    matmul_tiled(const __grid_constant__ MatmulArgs args) {
  using Product = std::conditional_t<Arch::kTensorCores, TensorProduct<T>, ScalarProduct<T>>;
  __shared__ uint4 pieces[2][kTiledRows * 8];
  __shared__ float code[Nested ? kScaleCodeSize : 1];
  __shared__ float codebook[kCodebookSize];
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  const float offset = share_scale_code<Nested>(args, code);
  if (threadIdx.x < kCodebookSize)
    codebook[threadIdx.x] = device_codebook(args.codebook, args.format)[threadIdx.x];
  const SharedTile<T> w(pieces[0]), x(pieces[1]);
  const Dequantizer<Nested> dequantizer{code, codebook, offset};

  const int64_t row_tiles = (args.rows + kTiledRows - 1) / kTiledRows;
  const int64_t first_row = blockIdx.x % row_tiles * kTiledRows;
  const int64_t first_x = blockIdx.x / row_tiles * kTiledM;
  const int row = threadIdx.x / kRunsPerStep, run = threadIdx.x % kRunsPerStep;

  Product product;
  const int64_t own_row = first_row + row;
  CodeRun<Nested> codes = load_codes<Arch, Nested>(args, own_row, run * kRun);
  uint4 values[kRun / 8];
  load_x_run<T>(args, first_x + row, run * kRun, values);
  for (int64_t k = 0; k < args.cols; k += kStep) {
    const int64_t next = k + kStep + run * kRun;
    __syncthreads();
    dequantizer.store(codes, w, row, run * (kRun / 8));
#pragma unroll
    for (int i = 0; i < kRun / 8; ++i) x.piece(row, run * (kRun / 8) + i) = values[i];
    __syncthreads();
    codes = load_codes<Arch, Nested>(args, own_row, next);
    load_x_run<T>(args, first_x + row, next, values);
    product.add(w, x);
  }

  const T *bias = static_cast<const T *>(args.bias);
  T *y = static_cast<T *>(args.y);
  product.each([&](int i, int j, float sum) {
    const int64_t out = first_row + i, of_x = first_x + j;
    if (out >= args.rows || of_x >= args.m) return;
    const float start = bias == nullptr ? 0.0f : to_float(bias[out]);
    y[of_x * args.y_stride + out] = from_float<T>(sum + start);
  });
}

}  // namespace
}  // namespace nf4::cuda
