// Everything that the model computes except the products, written once for each backend. A team of
// threads computes an element, a row or a head. A team is a thread, a warp or a block on a GPU, and
// one thread on the CPU.
#pragma once

#include <cmath>
#include <nf4/linears.hpp>
#include <nf4/llama_config.hpp>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif
#ifdef __CUDA_ARCH__
#define UNROLL _Pragma("unroll 8")
#else
#define UNROLL
#endif

using nf4::require;

constexpr int kVector = 16;    // numbers that a thread loads together; half as many on a GPU
constexpr int kThreads = 512;  // threads of a block
constexpr int kTile = 2048;    // keys whose scores attention has at a time

// A token at a position of a sequence.
struct Row {
  int32_t token, position, sequence;
};

// 16 bytes on a GPU.
template <class T, int kSize>
struct alignas(16) Vector {
  T of[kSize];
};

// Adds the products of two vectors to as many sums. A backend may overload it for its T.
template <class T, int kSize>
HOST_DEVICE void add_products(float *sums, const Vector<T, kSize> &u, const Vector<T, kSize> &v) {
  for (int j = 0; j < kSize; ++j) sums[j] += float(u.of[j]) * float(v.of[j]);
}

// A step of m rows. Products read normed, attended and inner. They write both (q, k and v, later
// gate and up), added (which the next norm adds to x) and, for the last row of each sequence,
// logits. A method does the work of team i.
template <class Backend>
struct Step : nf4::LlamaConfig {
  using LlamaConfig::LlamaConfig;
  using T = typename Backend::T;
  using Thread = typename Backend::template Team<1>;
  using Warp = typename Backend::template Team<32>;
  using Block = typename Backend::template Team<kThreads>;
  static constexpr int kSize = Backend::kReadsHost ? kVector : kVector / 2;
  using Vector = ::Vector<T, kSize>;
  // On a GPU a copy is one load. On the CPU it would keep the compiler from using vectors.
  using Loaded = std::conditional_t<Backend::kReadsHost, const Vector &, const Vector>;

  int m, context;
  Row *rows;
  const float *frequencies;
  T *x, *normed, *added, *attended, *both, *inner, *last, *logits;

  // x += added, or x = the row of a table of tokens; to = RMS norm of x.
  HOST_DEVICE void norm(Block team, int i, const T *table, const T *weight, T *to) {
    const int64_t row = int64_t{i} * hidden;
    const T *from = table ? table + int64_t{rows[i].token} * hidden : x + row;
    float sum = 0;
    for (int c = team.rank * kSize; c < hidden; c += team.size * kSize) {
      Vector a = at(from + c), b = at(table ? from + c : added + row + c);
      for (int j = 0; j < kSize; ++j)
        a.of[j] = table ? a.of[j] : T(float(a.of[j]) + float(b.of[j]));
      for (int j = 0; j < kSize; ++j) sum += float(a.of[j]) * float(a.of[j]);
      at(x + row + c) = a;
    }
    const float scale = 1 / sqrtf(team.sum(sum) / hidden + norm_eps);
    for (int c = team.rank * kSize; c < hidden; c += team.size * kSize) {
      Vector a = at(x + row + c), b = at(weight + c);
      for (int j = 0; j < kSize; ++j)
        a.of[j] = T(float(T(float(a.of[j]) * scale)) * float(b.of[j]));
      at(to + row + c) = a;
    }
  }

  // Applies the rotary position embedding to q in place and to k, and writes k and v to the cache
  // of the layer, [sequence][kv_head][context][head_dim]. i is a pair of columns, head_dim / 2
  // apart.
  HOST_DEVICE void rotate(Thread, int i, T *keys, T *values) {
    const int half = head_dim / 2, pair = i % half, all = heads + 2 * kv_heads,
              head = i / half % all;
    const bool is_value = head >= heads + kv_heads;
    const Row row = rows[i / half / all];
    T *from = both + int64_t{i / half} * head_dim + pair, *to = from;
    if (head >= heads)
      to = (is_value ? values : keys) + cached(row, (head - heads) % kv_heads, row.position) + pair;
    const float angle = is_value ? 0 : float(row.position) * frequencies[pair];
    const float c = cosf(angle), s = sinf(angle), a = float(from[0]), b = float(from[half]);
    to[0] = T(a * c - b * s);
    to[half] = T(b * c + a * s);
  }

  // Attention of one head and row, in tiles of keys: the scores, the softmax of all scores so far,
  // and the sum of the values. For the scores the team divides the keys. For the sum it divides
  // vectors of columns and, since there are more threads than vectors, the keys again.
  HOST_DEVICE void attend(Block team, int i, const T *keys, const T *values) {
    const int head = i / m, row = i % m, end = rows[row].position + 1, vectors = head_dim / kSize;
    const int parts = team.size > vectors ? team.size / vectors : 1;
    const int64_t cache = cached(rows[row], head / (heads / kv_heads), 0);
    const T *q = both + (int64_t{row} * (heads + 2 * kv_heads) + head) * head_dim;
    float *scores = team.memory(kTile + head_dim), *sums = scores + kTile;
    float largest = -INFINITY, sum = 0;
    for (int begin = 0; begin < end; begin += kTile) {
      const T *k = keys + cache + int64_t{begin} * head_dim, *v = values + (k - keys);
      const int count = end - begin < kTile ? end - begin : kTile;
      float most = largest, total = 0;
      for (int j = team.rank; j < count; j += team.size) {
        scores[j] = dot(q, k + int64_t{j} * head_dim, head_dim, 0, 1) / sqrtf(head_dim);
        most = fmaxf(most, scores[j]);
      }
      most = team.max(most);
      for (int j = team.rank; j < count; j += team.size)
        total += scores[j] = expf(scores[j] - most);
      const float before = expf(largest - most);
      sum = sum * before + team.sum(total);
      largest = most;
      for (int c = team.rank; c < vectors * parts; c += team.size) {
        float of[kSize];
        for (int n = 0; n < kSize; ++n) of[n] = begin ? sums[c * kSize + n] * before : 0;
        UNROLL
        for (int j = c / vectors; j < count; j += parts) {
          const Loaded value = at(v + int64_t{j} * head_dim + c % vectors * kSize);
          for (int n = 0; n < kSize; ++n) of[n] += scores[j] * float(value.of[n]);
        }
        for (int n = 0; n < kSize; ++n) sums[c * kSize + n] = of[n];
      }
      team.sync();
    }
    for (int c = team.rank; c < head_dim; c += team.size) {
      float all = 0;
      for (int part = 0; part < parts; ++part) all += sums[part * head_dim + c];
      attended[(int64_t{row} * heads + head) * head_dim + c] = T(all / sum);
    }
  }

  HOST_DEVICE void swiglu(Thread, int i) {
    const T *row = both + int64_t{i / intermediate} * 2 * intermediate + i % intermediate;
    const float gate = float(row[0]);
    inner[i] = T(gate / (1 + expf(-gate)) * float(row[intermediate]));
  }

  // y = x W^T + bias for row n of a dense W.
  HOST_DEVICE void dense(Warp team, int n, const T *w, nf4_matmul_args args) {
    const auto *x = static_cast<const T *>(args.x), *bias = static_cast<const T *>(args.bias);
    const int cols = int(args.x_stride);
    for (int64_t row = 0; row < args.m; ++row) {
      const float sum = dot(w + int64_t{n} * cols, x + row * cols, cols, team.rank, team.size);
      const T y = T(team.sum(sum) + (bias ? float(bias[n]) : 0));
      if (team.rank == 0) static_cast<T *>(args.y)[row * args.y_stride + n] = y;
    }
  }

  // Chooses the token of the largest logit, the first of equal ones.
  HOST_DEVICE void choose(Block team, int i) {
    const T *row = logits + int64_t{i} * vocabulary;
    float largest = -INFINITY, first = 0;
    for (int c = team.rank; c < vocabulary; c += team.size)
      if (float(row[c]) > largest) largest = float(row[c]), first = -float(c);
    const float all = team.max(largest);
    first = team.max(largest == all ? first : -INFINITY);
    if (team.rank == 0) rows[i] = {int32_t(-first), rows[i].position + 1, rows[i].sequence};
  }

 private:
  HOST_DEVICE static Vector &at(const T *numbers) {
    return *reinterpret_cast<Vector *>(const_cast<T *>(numbers));
  }
  // Returns the part of a dot product that thread `rank` of `size` computes.
  HOST_DEVICE static float dot(const T *a, const T *b, int count, int rank, int size) {
    float sums[kSize] = {}, sum = 0;
    UNROLL
    for (int c = rank * kSize; c < count; c += size * kSize) {
      const Loaded u = at(a + c), v = at(b + c);
      add_products(sums, u, v);
    }
    for (int j = 0; j < kSize; ++j) sum += sums[j];
    return sum;
  }
  HOST_DEVICE int64_t cached(Row row, int kv_head, int position) {
    return ((int64_t{row.sequence} * kv_heads + kv_head) * context + position) * head_dim;
  }
};
