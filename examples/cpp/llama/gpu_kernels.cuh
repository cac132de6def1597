// The kernels beside libnf4's, in bf16. Each may be launched before the last one has ended
// (programmatic dependent launch) and waits for it in begin().
#pragma once

#include <cuda_bf16.h>

#include "kernels.hpp"

using bf16 = __nv_bfloat16;

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMinKeys = 64;  // of a split of attention

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

__device__ inline void store(const float *from, bf16 *to) {
  uint4 bytes;
  auto *pairs = reinterpret_cast<__nv_bfloat162 *>(&bytes);
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
  *reinterpret_cast<uint4 *>(to) = bytes;
}

__device__ inline void load16(const bf16 *from, float *to) {
  load(from, to);
  load(from + 8, to + 8);
}

template <class Function>
__global__ void for_each_kernel(int count, Function function) {
  begin();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) function(i);
}

// A CTA a row, a thread 8 columns, or several times 8.
__global__ void norm_kernel(Norm<bf16> of) {
  begin();
  __shared__ float sums[32];
  const int64_t row = int64_t{blockIdx.x} * of.width;
  float sum = 0, x[8], other[8];
  for (int i = threadIdx.x * 8; i < of.width; i += blockDim.x * 8) {
    load(of.x + row + i, x);
    if (of.added) {
      load(of.added + row + i, other);
      for (int j = 0; j < 8; ++j) x[j] = __bfloat162float(__float2bfloat16(x[j] + other[j]));
      store(x, of.x + row + i);
    }
    for (int j = 0; j < 8; ++j) sum += x[j] * x[j];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0;
  const float scale = rsqrtf(warp_sum(sum) / of.width + of.eps);
  for (int i = threadIdx.x * 8; i < of.width; i += blockDim.x * 8) {
    load(of.x + row + i, x);
    load(of.weight + i, other);
    for (int j = 0; j < 8; ++j) x[j] = __bfloat162float(__float2bfloat16(x[j] * scale)) * other[j];
    store(x, of.y + row + i);
  }
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

// Softmax over all keys, of parts over some: a column of the numerator in each, and behind all D
// the largest score and the denominator. Returns the column.
template <int D>
__device__ float merge(const float *parts, int count, int column, float *largest, float *sum) {
  float value = 0;
  *largest = -1e30f;
  *sum = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) {
    const float *part = parts + i * (D + 2);
    const float before = *largest;
    *largest = fmaxf(before, part[D]);
    const float less = exp2f(before - *largest), scale = exp2f(part[D] - *largest);
    value = value * less + scale * part[column];
    *sum = *sum * less + scale * part[D + 1];
  }
  return value;
}

// Attention of R rows, which follow each other in one sequence, with one head: grid (heads, rows /
// R, splits). D / 16 threads share a key, 16 columns each; the other threads have other keys, and
// so have the splits, of which the last to end merges all. Each key is read once for all R rows.
// Decode has R = 1 and is bound by reading keys and values.
template <int D, int R>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(Attention<bf16> of, float *partials, unsigned *ended) {
  begin();
  constexpr int kLanes = D / 16, kKeys = kThreads / kLanes;
  __shared__ float parts[R][kKeys][D + 2];
  __shared__ bool is_last;
  const int head = blockIdx.x, lane = threadIdx.x % kLanes, mine = threadIdx.x / kLanes;
  const int split = blockIdx.z;
  const int64_t first = int64_t{blockIdx.y} * R;
  const int kv_head = head / (of.heads / of.kv_heads);
  const int64_t cached = of.cached(of.rows.row[first].sequence, kv_head) + lane * 16;
  float q[R][16], sums[R][16] = {}, largest[R], sum[R] = {};
  int position[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t row = min(first + r, of.rows.count - 1);
    load16(of.qkv + row * of.width() + int64_t{head} * D + lane * 16, q[r]);
    position[r] = of.rows.row[row].position;
    largest[r] = -1e30f;
  }
  const int all = position[R - 1] + 1;
  const int splits = min(int(gridDim.z), (all + kMinKeys - 1) / kMinKeys);
  if (split >= splits) return;
  const int end = int(int64_t{all} * (split + 1) / splits);
  const float scale = 1.4426950408889634f * rsqrtf(D);  // 2^x is cheaper than e^x
  for (int key = int(int64_t{all} * split / splits) + mine; key - mine < end; key += kKeys) {
    const int64_t at = cached + int64_t{min(key, end - 1)} * D;
    float k[16], v[16];
    load16(of.keys + at, k);
    load16(of.values + at, v);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float score = 0;
      for (int i = 0; i < 16; ++i) score += q[r][i] * k[i];
      score = warp_sum(score, kLanes) * scale;
      if (key >= end || key > position[r]) score = -INFINITY;
      const float before = largest[r];
      largest[r] = fmaxf(before, score);
      const float less = exp2f(before - largest[r]), weight = exp2f(score - largest[r]);
      for (int i = 0; i < 16; ++i) sums[r][i] = sums[r][i] * less + weight * v[i];
      sum[r] = sum[r] * less + weight;
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < 16; ++i) parts[r][mine][lane * 16 + i] = sums[r][i];
    if (lane == 0) parts[r][mine][D] = largest[r];
    if (lane == 0) parts[r][mine][D + 1] = sum[r];
  }
  __syncthreads();
  const int column = min(int(threadIdx.x), D - 1);
  float most, total;
  for (int r = 0; r < R && first + r < of.rows.count && splits == 1; ++r) {
    const float value = merge<D>(parts[r][0], kKeys, column, &most, &total);
    of.y[((first + r) * of.heads + head) * D + column] = __float2bfloat16(value / total);
  }
  if (splits == 1) return;
  const int64_t place = first * of.heads + head;
  float *partial = partials + (place * gridDim.z + split) * (D + 2);
  partial[column] = merge<D>(parts[0][0], kKeys, column, &most, &total);
  partial[D] = most;
  partial[D + 1] = total;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicInc(ended + place, splits - 1) == unsigned(splits - 1);
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const float value =
      merge<D>(partials + place * gridDim.z * (D + 2), splits, column, &most, &total);
  of.y[place * D + column] = __float2bfloat16(value / total);
}

// token = the largest logit's, the first of equal ones; a CTA a sequence, 1024 threads.
__global__ void choose_kernel(const bf16 *logits, int width, Rows rows) {
  begin();
  __shared__ unsigned long long bests[32];
  unsigned long long best = 0;
#pragma unroll 8
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
  rows.row[blockIdx.x].token = static_cast<int32_t>(0xffffffffu - (best & 0xffffffffu));
  ++rows.row[blockIdx.x].position;
}
