// The products of the tiles in shared memory, for the gradient's instances of the mma kernel
// (matmul/mma/kernel.cuh). The rows of the weight's tile run along the columns of dY, and its
// columns run along the columns of dX.
#pragma once

#include <type_traits>

#include "cuda/matmul/mma/kernel.cuh"

namespace nf4::cuda {
namespace {

// Like CtaMma.
template <class T>
struct GradMma : CtaMma<T> {
  __device__ __forceinline__ void add(const SmemTile<T> &w, const SmemTile<T> &dy) {
    const int column = threadIdx.x / 32 % 2 * 32, m = threadIdx.x / 64 * 16;
#pragma unroll
    for (int n = 0; n < kMmaTileK; n += 16) {
      uint32_t a[2][4], b[4];
      w.load_transposed_a(a[0], n, column);
      w.load_transposed_a(a[1], n, column + 16);
      dy.load_b(b, m, n);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          mma_m16n8k16(T{}, this->sums[i][j], a[i], b[2 * j], b[2 * j + 1]);
    }
  }
};

// Each thread has 4 x 4 outputs of dX, in fp32. It sums a tile first, which makes the rounding
// errors smaller.
template <class T>
struct GradFma {
  float sums[4][4] = {};

  __device__ __forceinline__ void add(const SmemTile<T> &w, const SmemTile<T> &dy) {
    const int four = threadIdx.x % 16, m = threadIdx.x / 16;
    float d[4][4] = {};
#pragma unroll 2
    for (int n = 0; n < kMmaTileK; n += 4) {
      float4 dys[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) dys[j] = dy.four(m + j * 16, n / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 ws = w.four(n + i, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float of_dy = i == 0 ? dys[j].x : i == 1 ? dys[j].y : i == 2 ? dys[j].z : dys[j].w;
          d[0][j] = __fmaf_rn(ws.x, of_dy, d[0][j]);
          d[1][j] = __fmaf_rn(ws.y, of_dy, d[1][j]);
          d[2][j] = __fmaf_rn(ws.z, of_dy, d[2][j]);
          d[3][j] = __fmaf_rn(ws.w, of_dy, d[3][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] += d[i][j];
  }

  // Calls visit(column of dX, row of dX, sum).
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        visit(static_cast<int>(threadIdx.x) % 16 * 4 + i,
              static_cast<int>(threadIdx.x) / 16 + j * 16, sums[i][j]);
  }
};

template <class Arch, class T>
using GradProducts =
    std::conditional_t<Arch::kTensorCores && !std::is_same_v<T, float>, GradMma<T>, GradFma<T>>;

}  // namespace
}  // namespace nf4::cuda
