// y = x W^T for any product on any GPU, mma_64x64 of configs.hpp: tiles of W and x in shared
// memory, with W rounded as dequantize rounds it. Where there are tensor cores, few_rows.cuh takes
// its place for integers and up to 16 rows of x.
//
// A CTA tile is 64 rows of the weight (A) by 64 rows of x (B), in K-tiles of 64 columns. While it
// multiplies one K-tile, the loads of the next are in flight. It is correct for every shape and
// alignment. On GPUs without 16-bit tensor-core products of both dtypes, and with fp32 x (16 rows
// at most), it multiplies in fp32.
//
// The bound is the rate of mma.sync with many rows of x, and the latency of a K-tile with few.
// docs/design/matmul-mma.md draws the data path and has the experiments.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/lora/term.cuh"
#include "cuda/matmul/args.hpp"
#include "cuda/matmul/mma/launch.hpp"
#include "cuda/matmul/mma/smem_tile.cuh"
#include "cuda/matmul/mma/x.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"

namespace nf4::cuda {
namespace {

constexpr int kVectorK = 16;  // columns that a thread loads
constexpr int kVectorsPerTileK = kMmaTileK / kVectorK;
static_assert(kMmaTileN == kMmaTileM && kMmaThreads == kMmaTileN * kVectorsPerTileK);

// ---- Products ----------------------------------------------------------------------------

// Each of eight warps has 32 x 16 outputs of y.
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

// The same with fewer loads from shared memory.
template <class T>
struct CtaLdmatrixMma : CtaMma<T> {
  __device__ __forceinline__ void add(const SmemTile<T> &w, const SmemTile<T> &x) {
    const int row = threadIdx.x / 32 % 2 * 32, m = threadIdx.x / 64 * 16;
#pragma unroll
    for (int k = 0; k < kMmaTileK; k += 16) {
      uint32_t a[2][4], b[4];
      w.load_a(a[0], row, k);
      w.load_a(a[1], row + 16, k);
      x.load_b(b, m, k);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < 2; ++n)
          mma_m16n8k16(T{}, this->sums[i][n], a[i], b[2 * n], b[2 * n + 1]);
    }
  }
};

// Each thread has 8 x 2 outputs of y, in fp32.
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

// Each thread has 4 x 1 outputs of y, for up to 16 rows of x in fp32. It sums a K-tile first, which
// makes the rounding errors smaller.
struct CtaFmaFp32 {
  static_assert(kMmaThreads == 16 * kFp32RowsOfX && kMmaTileN == 16 * 4);
  float sums[4] = {};

  __device__ __forceinline__ void add(const SmemTile<float> &w, const SmemTile<float> &x) {
    const int row = threadIdx.x % 16, m = threadIdx.x / 16;
    float d[4] = {};
#pragma unroll 4
    for (int chunk = 0; chunk < SmemTile<float>::kRowChunks; ++chunk) {
      const float4 x4 = x.vector(m, chunk);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 w4 = w.vector(row + i * 16, chunk);
        d[i] = __fmaf_rn(w4.x, x4.x, d[i]);
        d[i] = __fmaf_rn(w4.y, x4.y, d[i]);
        d[i] = __fmaf_rn(w4.z, x4.z, d[i]);
        d[i] = __fmaf_rn(w4.w, x4.w, d[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += d[i];
  }

  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      visit(static_cast<int>(threadIdx.x) % 16 + i * 16, static_cast<int>(threadIdx.x) / 16,
            sums[i]);
  }
};

template <class Arch, class T, class TensorMma>
using CtaProducts =
    std::conditional_t<std::is_same_v<T, float>, CtaFmaFp32,
                       std::conditional_t<Arch::kTensorCores, TensorMma, CtaFma<T>>>;

template <class T>
__device__ __forceinline__ float lora_of(const MatmulArgs &args, int64_t m, int64_t n) {
  const auto *const product = static_cast<const T *>(args.lora.product);
  return lora_term<T>(args.lora, product + m * args.lora.product_stride, n);
}
template <class T>
__device__ __forceinline__ float lora_of(const Int4MatmulArgs &, int64_t, int64_t) {
  return 0;
}

// ---- The kernel --------------------------------------------------------------------------

template <class Arch, class T, class Source>
using ProductsOf =
    CtaProducts<Arch, T, std::conditional_t<Source::kLdmatrix, CtaLdmatrixMma<T>, CtaMma<T>>>;

// Adds a CTA tile to `mma`: the rows of the weight from first_n on, times the rows of x. `x_row` is
// this thread's row of x. `Source` loads and dequantizes a kind of weight; `Mma` multiplies its
// tiles.
template <class T, class Source, class Mma>
__device__ __forceinline__ void multiply_tile(const typename Source::Args &args, Source &weight,
                                              int64_t first_n, int64_t x_row, const SmemTile<T> &w,
                                              const SmemTile<T> &x, Mma &mma) {
  constexpr int kXChunks = kVectorK / kPerVector<T>;
  const int row = threadIdx.x / kVectorsPerTileK, vector = threadIdx.x % kVectorsPerTileK;
  const int64_t own_row = first_n + Source::tile_row();
  weight.seek(own_row, Source::tile_column());
  typename Source::Registers codes = weight.load(own_row, Source::tile_column());
  uint4 values[kXChunks];
  load_x<T>(args, x_row, vector * kVectorK, values);
  for (int64_t k = 0; k < args.weight.cols; k += kMmaTileK) {
    const int64_t next = k + kMmaTileK + Source::tile_column();
    const int64_t next_x = k + kMmaTileK + vector * kVectorK;
    __syncthreads();
    weight.store(codes, w);
#pragma unroll
    for (int i = 0; i < kXChunks; ++i) x.chunk(row, vector * kXChunks + i) = values[i];
    __syncthreads();
    codes = weight.load(own_row, next);
    load_x<T>(args, x_row, next_x, values);
    mma.add(w, x);
  }
}

template <class Arch, class T, class Source, class Mma = ProductsOf<Arch, T, Source>>
__global__ void __launch_bounds__(kMmaThreads, Source::kResidentCtas)
    matmul_mma(const __grid_constant__ typename Source::Args args) {
  __shared__ uint4 chunks[2][kMmaTileN * SmemTile<T>::kRowChunks];
  __shared__ float scale_code[Source::kScaleCodeSize];
  __shared__ float codebook[Source::kCodebookSize];
  pdl_wait<Arch>();
  pdl_launch_dependents<Arch>();
  Source weight(args, scale_code, codebook);
  const SmemTile<T> w(chunks[0]), x(chunks[1]);

  const int64_t n_tiles = (args.weight.rows + kMmaTileN - 1) / kMmaTileN;
  const int64_t first_n = blockIdx.x % n_tiles * kMmaTileN;
  const int64_t first_m = blockIdx.x / n_tiles * kMmaTileM;
  Mma mma;
  multiply_tile<T>(args, weight, first_n, first_m + threadIdx.x / kVectorsPerTileK, w, x, mma);

  const T *bias = static_cast<const T *>(args.bias);
  T *y = static_cast<T *>(args.y);
  mma.each([&](int i, int j, float sum) {
    const int64_t n = first_n + i, m = first_m + j;
    if (n >= args.weight.rows || m >= args.m) return;
    const float bias_value = bias == nullptr ? 0.0f : to_float(bias[n]);
    y[m * args.y_stride + n] = from_float<T>(sum + bias_value + lora_of<T>(args, m, n));
  });
}

}  // namespace
}  // namespace nf4::cuda
