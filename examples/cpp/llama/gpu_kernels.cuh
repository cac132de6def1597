// The kernels beside libnf4's, in bf16. Each may be launched before the last one has ended
// (programmatic dependent launch) and waits for it in begin().
#pragma once

#include <cuda_bf16.h>

#include "kernels.hpp"

using bf16 = __nv_bfloat16;

constexpr int kThreads = 128, kWarps = kThreads / 32;

__device__ inline void begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

__device__ inline float warp_sum(float value, int lanes = 32) {
  for (int offset = 1; offset < lanes; offset *= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// 16 bytes: 8 numbers.
__device__ inline void load(const bf16 *from, float *to) {
  const uint4 bytes = *reinterpret_cast<const uint4 *>(from);
  const auto *pairs = reinterpret_cast<const __nv_bfloat162 *>(&bytes);
  for (int i = 0; i < 4; ++i)
    to[2 * i] = __low2float(pairs[i]), to[2 * i + 1] = __high2float(pairs[i]);
}

template <class Function>
__global__ void for_each_kernel(int64_t count, Function function) {
  begin();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) function(i);
}

// x += added; y = RMS norm of x; a CTA a row, 1024 threads.
__global__ void norm_kernel(bf16 *x, const bf16 *added, const bf16 *weight, float eps, int width,
                            bf16 *y) {
  begin();
  __shared__ float sums[32];
  const int64_t row = int64_t{blockIdx.x} * width;
  float sum = 0;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    if (added) x[row + i] = __hadd(x[row + i], added[row + i]);
    const float value = __bfloat162float(x[row + i]);
    sum += value * value;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  const float scale = rsqrtf(warp_sum(sums[threadIdx.x % 32]) / width + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    y[row + i] = __hmul(__float2bfloat16(__bfloat162float(x[row + i]) * scale), weight[i]);
}

// y = x W^T + bias of up to M rows of x: a warp a row of W.
template <int M>
__global__ void dense_kernel(const bf16 *weight, const bf16 *bias, const bf16 *x, int m, int rows,
                             int cols, bf16 *y, int64_t y_stride) {
  begin();
  const int n = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = blockIdx.y * M;
  if (n >= rows) return;
  float sums[M] = {};
#pragma unroll 4
  for (int k = lane * 8; k < cols; k += 256) {
    float w[8], a[8];
    load(weight + int64_t{n} * cols + k, w);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      if (first + i >= m) break;
      load(x + int64_t{first + i} * cols + k, a);
      for (int j = 0; j < 8; ++j) sums[i] += w[j] * a[j];
    }
  }
#pragma unroll
  for (int i = 0; i < M; ++i) {
    const float sum = warp_sum(sums[i]) + (bias ? __bfloat162float(bias[n]) : 0.0f);
    if (lane == 0 && first + i < m) y[(first + i) * y_stride + n] = __float2bfloat16(sum);
  }
}

// A softmax over some of the keys: numerators [D], the largest score and the denominator.
template <int D>
__device__ float merge(const float *parts, int count, int column, float *largest, float *sum) {
  float value = 0;
  *largest = -1e30f;
  *sum = 0;
  for (int i = 0; i < count; ++i) *largest = fmaxf(*largest, parts[i * (D + 2) + D]);
  for (int i = 0; i < count; ++i) {
    const float scale = exp2f(parts[i * (D + 2) + D] - *largest);
    value += scale * parts[i * (D + 2) + column];
    *sum += scale * parts[i * (D + 2) + D + 1];
  }
  return value;
}

// Attention of R rows, which follow each other in one sequence, with one head: grid (heads, rows /
// R, splits). D / 16 threads share a key, 16 columns each; the others have other keys, and the
// splits too, of which the last to end merges all. R = 1 is for decode, which is bound by reading
// keys and values; with more rows each key is read once for all R.
template <int D, int R>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(const bf16 *qkv, Rows rows, Heads heads, Cache<bf16> cache, bf16 *y,
                     float *partials, unsigned *ended) {
  begin();
  constexpr int kLanes = D / 16;
  __shared__ float parts[R][kWarps][D + 2];
  __shared__ bool last;
  const int head = blockIdx.x, lane = threadIdx.x % kLanes, splits = gridDim.z, split = blockIdx.z;
  const int64_t first = int64_t{blockIdx.y} * R;
  const int64_t cached =
      (rows.sequence[first] * heads.keys + head / (heads.queries / heads.keys)) * cache.positions;
  const bf16 *keys = cache.keys + cached * D + lane * 16,
             *values = cache.values + cached * D + lane * 16;
  float q[R][16], sums[R][16] = {}, largest[R], sum[R] = {};
  int position[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t row = min(first + r, rows.count - 1);
    const bf16 *from = qkv + row * heads.width() + int64_t{head} * D + lane * 16;
    load(from, q[r]);
    load(from + 8, q[r] + 8);
    position[r] = rows.position[row];
    largest[r] = -1e30f;
  }
  const int all = position[R - 1] + 1, end = int(int64_t{all} * (split + 1) / splits);
  const float scale = 1.4426950408889634f * rsqrtf(D);  // 2^x is cheaper than e^x
  for (int base = int(int64_t{all} * split / splits); base < end; base += kThreads / kLanes) {
    const int key = base + threadIdx.x / kLanes, read = min(key, end - 1);
    float k[16], v[16];
    load(keys + int64_t{read} * D, k);
    load(keys + int64_t{read} * D + 8, k + 8);
    load(values + int64_t{read} * D, v);
    load(values + int64_t{read} * D + 8, v + 8);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float score = 0;
      for (int i = 0; i < 16; ++i) score += q[r][i] * k[i];
      score = warp_sum(score, kLanes) * scale;
      if (key >= end || key > position[r]) score = -INFINITY;
      if (score > largest[r]) {
        const float less = exp2f(largest[r] - score);
        for (int i = 0; i < 16; ++i) sums[r][i] *= less;
        sum[r] *= less;
        largest[r] = score;
      }
      const float weight = exp2f(score - largest[r]);
      for (int i = 0; i < 16; ++i) sums[r][i] += weight * v[i];
      sum[r] += weight;
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float most = largest[r];
    for (int offset = kLanes; offset < 32; offset *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    const float less = exp2f(largest[r] - most);
    float *part = parts[r][threadIdx.x / 32];
    for (int i = 0; i < 16; ++i) {
      float value = sums[r][i] * less;
      for (int offset = kLanes; offset < 32; offset *= 2)
        value += __shfl_xor_sync(~0u, value, offset);
      if (threadIdx.x % 32 < kLanes) part[lane * 16 + i] = value;
    }
    float total = sum[r] * less;
    for (int offset = kLanes; offset < 32; offset *= 2)
      total += __shfl_xor_sync(~0u, total, offset);
    if (threadIdx.x % 32 == 0) part[D] = most, part[D + 1] = total;
  }
  __syncthreads();
  const int column = threadIdx.x;
  float most, total;
#pragma unroll
  for (int r = 0; r < R && splits == 1; ++r) {
    if (column >= D || first + r >= rows.count) break;
    const float value = merge<D>(parts[r][0], kWarps, column, &most, &total);
    y[((first + r) * heads.queries + head) * D + column] = __float2bfloat16(value / total);
  }
  if (splits == 1) return;
  const int64_t place = first * heads.queries + head;
  float *mine = partials + place * splits * (D + 2);
  if (column < D) {
    mine[split * (D + 2) + column] = merge<D>(parts[0][0], kWarps, column, &most, &total);
    if (column == 0) mine[split * (D + 2) + D] = most, mine[split * (D + 2) + D + 1] = total;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(ended + place, splits - 1) == unsigned(splits - 1);
  __syncthreads();
  if (!last || column >= D) return;
  __threadfence();
  const float value = merge<D>(mine, splits, column, &most, &total);
  y[place * D + column] = __float2bfloat16(value / total);
}

// token = the largest logit's, the first of equal ones; a CTA a sequence, 1024 threads.
__global__ void choose_kernel(const bf16 *logits, int width, Rows rows) {
  begin();
  __shared__ unsigned long long bests[32];
  unsigned long long best = 0;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const int bits = __float_as_int(__bfloat162float(logits[int64_t{blockIdx.x} * width + i]));
    const unsigned ordered = bits < 0 ? ~bits : bits | 0x80000000u;
    best = max(best, static_cast<unsigned long long>(ordered) << 32 | (0xffffffffu - i));
  }
  for (int twice = 0; twice < 2; ++twice) {
    for (int offset = 1; offset < 32; offset *= 2)
      best = max(best, __shfl_xor_sync(~0u, best, offset));
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    __syncthreads();
    best = bests[threadIdx.x % 32];
    __syncthreads();
  }
  if (threadIdx.x) return;
  rows.token[blockIdx.x] = static_cast<int32_t>(0xffffffffu - (best & 0xffffffffu));
  ++rows.position[blockIdx.x];
}
