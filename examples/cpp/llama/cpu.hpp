// The model on the CPU, in fp32: libnf4's products, and plain loops for the rest.
#pragma once

#include <unistd.h>

#include <future>
#include <thread>

#include "model.hpp"

class Cpu {
 public:
  using T = float;
  static constexpr const char *kName = "cpu";

  explicit Cpu(int threads) : threads_(threads) {}

  template <class U>
  U *allocate(size_t count, const std::string &what) {
    const double all = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE),
                 bytes = double(count) * sizeof(U);
    // malloc promises more than there is.
    void *memory = taken_ + bytes < all ? std::malloc(count * sizeof(U)) : nullptr;
    require(memory, "too little memory: ", what, " takes ", bytes / 1e9, " GB; taken are ",
            taken_ / 1e9);
    memory_.emplace_back(memory, std::free);
    taken_ += bytes;
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
  void prepare(const Config &) {}
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

  void norm(int64_t m, const Norm<float> &of) {
    for (int64_t row = 0; row < m; ++row) {
      float *x = of.x + row * of.width, *y = of.y + row * of.width;
      if (of.added)
        for (int i = 0; i < of.width; ++i) x[i] += of.added[row * of.width + i];
      const float scale =
          1 / std::sqrt(dot(x, x, of.width) / static_cast<float>(of.width) + of.eps);
      for (int i = 0; i < of.width; ++i) y[i] = x[i] * scale * of.weight[i];
    }
  }

  void attention(const Attention<float> &of) {
    const int64_t keys = of.rows.row[of.rows.count - 1].position + 1;
    share(of.rows.count * of.heads, keys * of.dim, [&of](int64_t i) {
      const int64_t head = i % of.heads, last = of.rows.row[i / of.heads].position;
      const int64_t cached =
          of.cached(of.rows.row[i / of.heads].sequence, head / (of.heads / of.kv_heads));
      const float *q = of.qkv + i / of.heads * of.width() + head * of.dim, *k = of.keys + cached,
                  *v = of.values + cached;
      float *y = of.y + i * of.dim, largest = -INFINITY, sum = 0;
      std::vector<float> scores(last + 1);
      for (int64_t j = 0; j <= last; ++j) {
        scores[j] = dot(q, k + j * of.dim, of.dim) / std::sqrt(static_cast<float>(of.dim));
        largest = std::max(largest, scores[j]);
      }
      std::fill(y, y + of.dim, 0.0f);
      for (int64_t j = 0; j <= last; ++j) {
        const float weight = std::exp(scores[j] - largest);
        sum += weight;
        for (int c = 0; c < of.dim; ++c) y[c] += weight * v[j * of.dim + c];
      }
      for (int c = 0; c < of.dim; ++c) y[c] /= sum;
    });
  }

  void choose(const float *logits, int64_t width, const Rows &rows) {
    for (int64_t row = 0; row < rows.count; ++row, logits += width) {
      rows.row[row].token = static_cast<int32_t>(std::max_element(logits, logits + width) - logits);
      ++rows.row[row].position;
    }
  }

 private:
  // Calls function(0), function(1), ..., each of which reads so many numbers, on as many threads as
  // pay for their start.
  template <class Function>
  void share(int64_t count, int64_t numbers, const Function &function) const {
    const int64_t threads = threads_ ? threads_ : std::thread::hardware_concurrency(),
                  parts = std::max<int64_t>(1, std::min({threads, count, count * numbers >> 18}));
    const auto part = [&](int64_t i) {
      for (int64_t j = count * i / parts; j < count * (i + 1) / parts; ++j) function(j);
    };
    std::vector<std::future<void>> others;
    for (int64_t i = 1; i < parts; ++i) others.push_back(std::async(std::launch::async, part, i));
    part(0);
    for (std::future<void> &other : others) other.get();
  }

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
  void dense(const Linear &linear, const nf4_matmul_args &args) const {
    const auto *weight = static_cast<const float *>(linear.dense),
               *x = static_cast<const float *>(args.x);
    const auto *bias = static_cast<const float *>(args.bias);
    share(linear.rows, args.m * linear.cols, [&](int64_t n) {
      for (int64_t row = 0; row < args.m; ++row) {
        const float sum = dot(x + row * args.x_stride, weight + n * linear.cols, linear.cols);
        static_cast<float *>(args.y)[row * args.y_stride + n] = sum + (bias ? bias[n] : 0);
      }
    });
  }

  int threads_;       // 0: all processors
  double taken_ = 0;  // bytes
  std::vector<std::unique_ptr<void, void (*)(void *)>> memory_;
};
