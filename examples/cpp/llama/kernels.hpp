// The model's shape, and what it computes beside products, the same on each backend: a team of
// threads has an element, a row or a head. On a GPU it is a thread, a warp or a block; on the CPU
// one thread.
#pragma once

#include <cmath>

#include "weights.hpp"

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

// config.json. What is not computed here is refused by name.
struct Config {
  int vocabulary, hidden, wide, layers, heads, kv_heads, dim, context;
  float eps;
  bool tied, attention_bias, mlp_bias;

  explicit Config(const Json &json) {
    for (const auto &[key, computed] : {std::pair{"model_type", "llama"}, {"hidden_act", "silu"}}) {
      const std::string is = json.text(key, computed);
      require(is == computed, json.name, ": ", key, " is ", is, "; what is computed: ", computed);
    }
    const auto size = [&json](const char *key, int64_t multiple, const std::string &otherwise) {
      const int64_t size = json.size(key, otherwise);
      require(0 < size && size < 1 << 24 && size % multiple == 0, json.name, ": ", key, " is ",
              size, "; multiples of ", multiple, " are computed");
      return static_cast<int>(size);
    };
    vocabulary = size("vocab_size", 1, "");
    hidden = size("hidden_size", 16, "");
    wide = size("intermediate_size", 16, "");
    layers = size("num_hidden_layers", 1, "");
    kv_heads = size("num_key_value_heads", 1, json.text("num_attention_heads"));
    heads = size("num_attention_heads", kv_heads, "");
    dim = size("head_dim", 16, std::to_string(hidden / heads));
    context = size("max_position_embeddings", 1, "2048");
    // A kernel counts the numbers of a chunk's rows in an int.
    require(std::max({int64_t{hidden}, int64_t{wide}, int64_t{heads} * dim}) < 1 << 21, json.name,
            ": hidden_size, intermediate_size or num_attention_heads * head_dim is too large");
    eps = static_cast<float>(json.number("rms_norm_eps", "1e-6"));
    tied = json.text("tie_word_embeddings", "false") == "true";
    attention_bias = json.text("attention_bias", "false") == "true";
    mlp_bias = json.text("mlp_bias", "false") == "true";
  }
};

// Of RoPE, for each pair of columns of a head.
inline std::vector<float> frequencies(const Json &json, int dim) {
  // transformers 5 has rope_parameters; before, rope_theta stood beside rope_scaling.
  const bool is_new =
      json.has("rope_parameters/rope_theta") || json.has("rope_parameters/rope_type");
  const std::string rope = is_new ? "rope_parameters/" : "rope_scaling/";
  const std::string type = json.text(rope + "rope_type", json.text(rope + "type", "default"));
  require(type == "default" || type == "llama3", json.name, ": rope_type is ", type,
          "; what is computed: default, llama3");
  const double theta = json.number(rope + "rope_theta", json.text("rope_theta", "10000"));
  std::vector<float> frequencies;
  for (int pair = 0; pair < dim / 2; ++pair) {
    double frequency = std::pow(theta, -2.0 * pair / dim);
    if (type == "llama3") {
      // Long wavelengths are stretched, short ones are not, those between are interpolated.
      const double low = json.number(rope + "low_freq_factor"),
                   high = json.number(rope + "high_freq_factor"),
                   positions = json.number(rope + "original_max_position_embeddings"),
                   turns = positions * frequency / (2 * M_PI),
                   kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
      frequency *= kept + (1 - kept) / json.number(rope + "factor");
    }
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

// A token at a position of a sequence.
struct Row {
  int32_t token, position, sequence;
};

// Numbers that a thread loads together: 16 bytes on a GPU.
template <class T>
struct alignas(16) Vector {
  T of[sizeof(T) == 4 ? 16 : 8];
};

// A step of m rows. Products read normed, attended and inner, and write both (q, k and v, then gate
// and up), added (to x, by the next norm) and logits. A method does the i-th team's work.
template <class Backend>
struct Step : Config {
  using T = typename Backend::T;
  using Thread = typename Backend::Thread;
  using Warp = typename Backend::Warp;
  using Block = typename Backend::Block;
  // A copy is one load on a GPU, and keeps a compiler for the CPU from using vectors.
  using Loaded = std::conditional_t<Backend::kReadsHost, const Vector<T> &, const Vector<T>>;
  static constexpr int kSize = sizeof(Vector<T>) / sizeof(T);

  int m;
  Row *rows;
  const float *frequencies;
  T *x, *normed, *added, *attended, *both, *inner, *logits;

  explicit Step(const Config &config) : Config(config) {}

  HOST_DEVICE void embed(Thread, int i, const T *table) {
    x[i] = table[int64_t{rows[i / hidden].token} * hidden + i % hidden];
    added[i] = T(0.0f);
  }

  // x += added; normed = RMS norm of x.
  HOST_DEVICE void norm(Block team, int i, const T *weight) {
    const int64_t row = int64_t{i} * hidden;
    float sum = 0;
    for (int c = team.rank * kSize; c < hidden; c += team.size * kSize) {
      Vector<T> a = at(x + row + c), b = at(added + row + c);
      for (int j = 0; j < kSize; ++j) a.of[j] = T(float(a.of[j]) + float(b.of[j]));
      for (int j = 0; j < kSize; ++j) sum += float(a.of[j]) * float(a.of[j]);
      at(x + row + c) = a;
    }
    const float scale = 1 / sqrtf(team.sum(sum) / hidden + eps);
    for (int c = team.rank * kSize; c < hidden; c += team.size * kSize) {
      Vector<T> a = at(x + row + c), b = at(weight + c);
      for (int j = 0; j < kSize; ++j)
        a.of[j] = T(float(T(float(a.of[j]) * scale)) * float(b.of[j]));
      at(normed + row + c) = a;
    }
  }

  // Rotary position embedding of q in place and of k into the cache, and v into the cache, all of
  // a layer: [sequence][kv_head][context][dim]. i is a pair of columns, dim / 2 apart.
  HOST_DEVICE void rotate(Thread, int i, T *keys, T *values) {
    const int half = dim / 2, pair = i % half, all = heads + 2 * kv_heads, head = i / half % all;
    const bool is_value = head >= heads + kv_heads;
    const Row row = rows[i / half / all];
    T *from = both + int64_t{i / half} * dim + pair, *to = from;
    if (head >= heads)
      to = (is_value ? values : keys) + cached(row, (head - heads) % kv_heads, row.position) + pair;
    const float angle = is_value ? 0 : float(row.position) * frequencies[pair];
    const float c = cosf(angle), s = sinf(angle), a = float(from[0]), b = float(from[half]);
    to[0] = T(a * c - b * s);
    to[half] = T(b * c + a * s);
  }

  // A row's head: scores of all keys, softmax, and the sum of the values. The team shares first the
  // keys, then vectors of columns and, as there are more threads, again the keys.
  HOST_DEVICE void attend(Block team, int i, const T *keys, const T *values) {
    const int head = i / m, kv_head = head / (heads / kv_heads), vectors = dim / kSize;
    const int parts = team.size > vectors ? team.size / vectors : 1;
    const Row row = rows[i % m];
    const int64_t cache = cached(row, kv_head, 0), width = (heads + 2 * kv_heads) * dim;
    float *scores = team.memory, *sums = scores + context, largest = -INFINITY, sum = 0;
    for (int j = team.rank; j <= row.position; j += team.size) {
      const T *q = both + i % m * width + head * dim, *k = keys + cache + int64_t{j} * dim;
      scores[j] = dot(q, k, dim, 0, 1) / sqrtf(dim);
      largest = fmaxf(largest, scores[j]);
    }
    largest = team.max(largest);
    for (int j = team.rank; j <= row.position; j += team.size)
      sum += scores[j] = expf(scores[j] - largest);
    sum = team.sum(sum);
    for (int c = team.rank; c < vectors * parts; c += team.size) {
      float of[kSize] = {};
      UNROLL
      for (int j = c / vectors; j <= row.position; j += parts) {
        const Loaded v = at(values + cache + int64_t{j} * dim + c % vectors * kSize);
        for (int n = 0; n < kSize; ++n) of[n] += scores[j] * float(v.of[n]);
      }
      for (int n = 0; n < kSize; ++n) sums[c * kSize + n] = of[n];
    }
    team.sync();
    for (int c = team.rank; c < dim; c += team.size) {
      float all = 0;
      for (int part = 0; part < parts; ++part) all += sums[part * dim + c];
      attended[(int64_t{i % m} * heads + head) * dim + c] = T(all / sum);
    }
  }

  HOST_DEVICE void swiglu(Thread, int i) {
    const T *row = both + int64_t{i / wide} * 2 * wide + i % wide;
    const float gate = float(row[0]);
    inner[i] = T(gate / (1 + expf(-gate)) * float(row[wide]));
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

  // token = that of the largest logit, the first of equal ones.
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
  HOST_DEVICE static Vector<T> &at(const T *numbers) {
    return *reinterpret_cast<Vector<T> *>(const_cast<T *>(numbers));
  }
  // The part of one of `size` threads in a dot product.
  HOST_DEVICE static float dot(const T *a, const T *b, int count, int rank, int size) {
    float sums[kSize] = {}, sum = 0;
    UNROLL
    for (int c = rank * kSize; c < count; c += size * kSize) {
      const Loaded u = at(a + c), v = at(b + c);
      for (int j = 0; j < kSize; ++j) sums[j] += float(u.of[j]) * float(v.of[j]);
    }
    for (int j = 0; j < kSize; ++j) sum += sums[j];
    return sum;
  }
  HOST_DEVICE int64_t cached(Row row, int kv_head, int position) {
    return ((int64_t{row.sequence} * kv_heads + kv_head) * context + position) * dim;
  }
};
