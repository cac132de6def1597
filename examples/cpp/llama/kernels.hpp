// The model's shape, and what it computes beside products, the same on each backend: a team of
// threads has an element, a row or a head. On a GPU it is a thread, a warp or a block; on the CPU
// one thread.
#pragma once

#include <cmath>
#include <nf4/checkpoint.hpp>

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

constexpr int kTile = 256;  // keys whose scores attention has at a time

// config.json. What is not computed here is refused by name.
struct Config {
  int vocabulary, hidden, wide, layers, heads, kv_heads, dim, context;
  float eps;
  bool tied, attention_bias, mlp_bias;

  explicit Config(const nf4::Json &json) {
    json.choice("model_type", {"llama"}, "llama");
    json.choice("hidden_act", {"silu"}, "silu");
    const auto size = [&json](const char *key, int multiple, std::optional<int64_t> otherwise) {
      const int64_t size = json.size(key, otherwise, (1 << 21) - 1);
      require(size > 0 && size % multiple == 0, json.name, ": ", key, " is ", size,
              "; multiples of ", multiple, " are computed");
      return static_cast<int>(size);
    };
    vocabulary = size("vocab_size", 1, {});
    hidden = size("hidden_size", 16, {});
    wide = size("intermediate_size", 16, {});
    layers = size("num_hidden_layers", 1, {});
    kv_heads = size("num_key_value_heads", 1, json.size("num_attention_heads"));
    heads = size("num_attention_heads", kv_heads, {});
    dim = size("head_dim", 16, hidden / heads);
    context = size("max_position_embeddings", 1, 2048);
    // A kernel counts the numbers of a chunk's rows in an int.
    require(dim <= 4096 && heads * dim < 1 << 21, json.name,
            ": num_attention_heads * head_dim is too large");
    eps = static_cast<float>(json.number("rms_norm_eps", 1e-6));
    tied = json.flag("tie_word_embeddings", false);
    attention_bias = json.flag("attention_bias", false);
    mlp_bias = json.flag("mlp_bias", false);
  }
};

// Of RoPE, for each pair of columns of a head.
inline std::vector<float> frequencies(const nf4::Json &json, int dim) {
  // transformers 5 has rope_parameters; before, rope_theta stood beside rope_scaling.
  const std::string rope = json.has("rope_parameters") ? "rope_parameters/" : "rope_scaling/";
  const std::string type = rope + (json.has(rope + "rope_type") ? "rope_type" : "type");
  const bool is_llama3 = json.choice(type, {"default", "llama3"}, "default") == "llama3";
  const double theta = json.number(rope + "rope_theta", json.number("rope_theta", 10000));
  std::vector<float> frequencies;
  for (int pair = 0; pair < dim / 2; ++pair) {
    double frequency = std::pow(theta, -2.0 * pair / dim);
    if (is_llama3) {
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
  struct alignas(16) Sums {
    float of[kSize];
  };

  int m, parts;
  Row *rows;
  const float *frequencies;
  float *partial;
  int *arrived;
  T *x, *normed, *added, *attended, *both, *inner, *logits;

  explicit Step(const Config &config) : Config(config) {}

  // x += added, or x = the row of a table of tokens; to = RMS norm of x.
  HOST_DEVICE void norm(Block team, int i, const T *table, const T *weight, T *to) {
    const int64_t row = int64_t{i} * hidden;
    const T *from = table ? table + int64_t{rows[i].token} * hidden : x + row;
    float sum = 0;
    for (int c = team.rank * kSize; c < hidden; c += team.size * kSize) {
      Vector<T> a = at(from + c), b = at(added + row + c);
      for (int j = 0; j < kSize; ++j)
        a.of[j] = table ? a.of[j] : T(float(a.of[j]) + float(b.of[j]));
      for (int j = 0; j < kSize; ++j) sum += float(a.of[j]) * float(a.of[j]);
      at(x + row + c) = a;
    }
    const float scale = 1 / sqrtf(team.sum(sum) / hidden + eps);
    for (int c = team.rank * kSize; c < hidden; c += team.size * kSize) {
      Vector<T> a = at(x + row + c), b = at(weight + c);
      for (int j = 0; j < kSize; ++j)
        a.of[j] = T(float(T(float(a.of[j]) * scale)) * float(b.of[j]));
      at(to + row + c) = a;
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

  // A row's head and one of `parts` shares of its keys, tile by tile: scores, their softmax so far,
  // and the sum of the values. The team that ends last joins the shares. A team shares first the
  // keys, then vectors of columns and, as there are more threads, again the keys.
  HOST_DEVICE void attend(Block team, int i, const T *keys, const T *values) {
    const int cell = i / parts, head = cell / m, vectors = dim / kSize;
    const int shares = team.size > vectors ? team.size / vectors : 1;
    const Row row = rows[cell % m];
    const int64_t cache = cached(row, head / (heads / kv_heads), 0);
    const T *q = both + int64_t{cell % m} * (heads + 2 * kv_heads) * dim + head * dim;
    float *scores = team.memory(kTile + vectors * shares * kSize), largest = -INFINITY, sum = 0;
    auto *sums = reinterpret_cast<Sums *>(scores + kTile);
    for (int c = team.rank; c < vectors * shares; c += team.size) sums[c] = {};
    team.sync();
    for (int begin = i % parts * kTile; begin <= row.position; begin += parts * kTile) {
      const int count = row.position + 1 - begin < kTile ? row.position + 1 - begin : kTile;
      float most = largest, added = 0;
      for (int j = team.rank; j < count; j += team.size) {
        scores[j] = dot(q, keys + cache + int64_t{begin + j} * dim, dim, 0, 1) / sqrtf(dim);
        most = fmaxf(most, scores[j]);
      }
      most = team.max(most);
      const float scale = expf(largest - most);  // of the sums of earlier tiles
      largest = most;
      for (int j = team.rank; j < count; j += team.size)
        added += scores[j] = expf(scores[j] - largest);
      sum = sum * scale + team.sum(added);
      for (int c = team.rank; c < vectors * shares; c += team.size) {
        Sums of = sums[c];
        for (int n = 0; n < kSize; ++n) of.of[n] *= scale;
        UNROLL
        for (int j = c / vectors; j < count; j += shares) {
          const Loaded v = at(values + cache + int64_t{begin + j} * dim + c % vectors * kSize);
          for (int n = 0; n < kSize; ++n) of.of[n] += scores[j] * float(v.of[n]);
        }
        sums[c] = of;
      }
      team.sync();
    }
    const int size = dim + 2;
    float *own = partial + int64_t{i} * size, *all = partial + int64_t{cell} * parts * size;
    for (int c = team.rank; c < size; c += team.size) {
      own[c] = c == dim ? largest : c == dim + 1 ? sum : 0;
      for (int share = 0; c < dim && share < shares; ++share)
        own[c] += sums[share * vectors + c / kSize].of[c % kSize];
    }
    if (!team.is_last(arrived + cell, parts)) return;
    for (int part = 0; part < parts; ++part) largest = fmaxf(largest, all[part * size + dim]);
    for (int c = team.rank; c < dim; c += team.size) {
      float numerator = 0, denominator = 0;
      for (const float *part = all; part < all + parts * size; part += size) {
        const float scale = expf(part[dim] - largest);
        numerator += scale * part[c];
        denominator += scale * part[dim + 1];
      }
      attended[(int64_t{cell % m} * heads + head) * dim + c] = T(numerator / denominator);
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
