// The model on the CPU, in fp32: libnf4's products, and plain loops for the rest.
#pragma once

#include <unistd.h>

#include "model.hpp"

class Cpu {
 public:
  using T = float;
  static constexpr const char *kName = "cpu";

  explicit Cpu(int threads) : threads_(threads) {}

  template <class U>
  U *allocate(size_t count, const std::string &what) {
    const double bytes = static_cast<double>(count) * sizeof(U);
    const double all = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    void *memory = bytes < all ? std::malloc(count * sizeof(U)) : nullptr;
    require(memory, "too little memory: " + what + " takes " + std::to_string(bytes / 1e9) + " GB");
    memory_.emplace_back(memory, std::free);
    return static_cast<U *>(memory);
  }
  template <class U>
  void upload(U *to, const U *from, size_t count) {
    std::memcpy(to, from, count * sizeof(U));
  }
  template <class U>
  std::vector<U> download(const U *from, size_t count) const {
    return {from, from + count};
  }
  // A part of a 4-bit weight is read where it is mapped, if it is aligned.
  void *place(const View &view) {
    if (reinterpret_cast<uintptr_t>(view.data) % 4 == 0) return const_cast<uint8_t *>(view.data);
    void *copy = allocate<uint8_t>(view.bytes, view.name);
    return std::memcpy(copy, view.data, view.bytes);
  }
  void reserve(const Group &, int64_t) {}
  template <class Step>
  void repeat(const Step &step) {
    step();
  }
  template <class Function>
  void for_each(int64_t count, const Function &function) {
    for (int64_t i = 0; i < count; ++i) function(i);
  }

  void products(const Group &group, const float *x, int64_t m, float *y) {
    const Products of(group, NF4_DTYPE_FP32, x, m, y);
    check(nf4_matmul_batch_cpu(of.nf4.data(), of.nf4_args.data(), of.nf4.size(), threads_));
    check(nf4_int4_matmul_batch_cpu(of.int4.data(), of.int4_args.data(), of.int4.size(), threads_));
    for (size_t i = 0; i < of.dense.size(); ++i) dense(*of.dense[i], of.dense_args[i]);
  }

  void norm(float *x, const float *added, const float *weight, float eps, int64_t m, int64_t width,
            float *y) {
    for (int64_t row = 0; row < m; ++row, x += width, y += width) {
      if (added)
        for (int64_t i = 0; i < width; ++i) x[i] += added[row * width + i];
      const float scale = 1 / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
      for (int64_t i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
    }
  }

  void attention(const float *qkv, const Rows &rows, const Heads &heads, const Cache<float> &cache,
                 float *y) {
    std::vector<float> scores(cache.positions);
    for (int64_t i = 0; i < rows.count * heads.queries; ++i, y += heads.dim) {
      const int64_t row = i / heads.queries, head = i % heads.queries, last = rows.position[row];
      const float *q = qkv + row * heads.width() + head * heads.dim;
      const int64_t cached = rows.sequence[row] * heads.keys + head / (heads.queries / heads.keys);
      const float *k = cache.keys + cached * cache.positions * heads.dim;
      const float *v = cache.values + cached * cache.positions * heads.dim;
      float largest = -INFINITY, sum = 0;
      for (int64_t j = 0; j <= last; ++j) {
        scores[j] = dot(q, k + j * heads.dim, heads.dim) / std::sqrt(static_cast<float>(heads.dim));
        largest = std::max(largest, scores[j]);
      }
      std::fill(y, y + heads.dim, 0.0f);
      for (int64_t j = 0; j <= last; ++j) {
        const float weight = std::exp(scores[j] - largest);
        sum += weight;
        for (int64_t c = 0; c < heads.dim; ++c) y[c] += weight * v[j * heads.dim + c];
      }
      for (int64_t c = 0; c < heads.dim; ++c) y[c] /= sum;
    }
  }

  void choose(const float *logits, int64_t width, const Rows &rows) {
    for (int64_t row = 0; row < rows.count; ++row, logits += width) {
      rows.token[row] = static_cast<int32_t>(std::max_element(logits, logits + width) - logits);
      ++rows.position[row];
    }
  }

 private:
  // Several sums, which a compiler makes vectors of.
  static float dot(const float *a, const float *b, int64_t count) {
    float sums[16] = {}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
      for (int lane = 0; lane < 16; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    for (; i < count; ++i) sum += a[i] * b[i];
    for (const float each : sums) sum += each;
    return sum;
  }
  static void dense(const Linear &linear, const nf4_matmul_args &args) {
    const auto *weight = static_cast<const float *>(linear.dense),
               *bias = static_cast<const float *>(args.bias);
    for (int64_t i = 0; i < args.m * linear.rows; ++i) {
      const int64_t row = i / linear.rows, n = i % linear.rows;
      static_cast<float *>(args.y)[row * args.y_stride + n] =
          dot(static_cast<const float *>(args.x) + row * args.x_stride, weight + n * linear.cols,
              linear.cols) +
          (bias ? bias[n] : 0);
    }
  }

  int threads_;
  std::vector<std::unique_ptr<void, void (*)(void *)>> memory_;
};
