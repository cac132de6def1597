// What a backend computes beside products. Where elements do not depend on each other, its for_each
// calls a function for 0, 1, ..., count - 1: the same on the CPU and the GPU.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// A token at a position of a sequence.
struct Row {
  int32_t token, position, sequence;
};
struct Rows {
  Row *row;
  int64_t count;
};

// x += added, if that is not NULL; y = RMS norm of x. [rows, width].
template <class T>
struct Norm {
  T *x;
  const T *added, *weight;
  float eps;
  int width;
  T *y;
};

// x = the embeddings of tokens. [rows, hidden]
template <class T>
struct Embed {
  const T *table;
  Rows rows;
  int hidden;
  T *x;
  HOST_DEVICE void operator()(int i) const {
    x[i] = table[int64_t{rows.row[i / hidden].token} * hidden + i % hidden];
  }
};

// Attention of the rows of qkv, [q, k, v], to the keys and values of their sequences up to their
// own positions: y [rows, heads * dim].
template <class T>
struct Attention {
  int heads, kv_heads, dim, positions;
  T *keys, *values;  // the cache: [sequence][kv_head][positions][dim]
  T *qkv;
  Rows rows;
  T *y;
  HOST_DEVICE int width() const { return (heads + 2 * kv_heads) * dim; }
  // Where the keys, or values, of a head begin.
  HOST_DEVICE int64_t cached(int sequence, int kv_head) const {
    return (int64_t{sequence} * kv_heads + kv_head) * positions * dim;
  }
};

// What comes before attention: rotary position embedding of q in place and of k into the cache, and
// v into the cache. An element is a pair of columns, dim / 2 apart.
template <class T>
struct Rotate {
  Attention<T> of;
  const float *frequencies;
  HOST_DEVICE void operator()(int i) const {
    const int half = of.dim / 2, pair = i % half, all = of.heads + 2 * of.kv_heads;
    const int head = i / half % all, kv_head = (head - of.heads) % of.kv_heads,
              row = i / half / all;
    const bool is_value = head >= of.heads + of.kv_heads;
    const Row at = of.rows.row[row];
    T *from = of.qkv + int64_t{row} * of.width() + head * of.dim + pair, *to = from;
    if (head >= of.heads)
      to = (is_value ? of.values : of.keys) + of.cached(at.sequence, kv_head) +
           int64_t{at.position} * of.dim + pair;
    const float angle = is_value ? 0 : static_cast<float>(at.position) * frequencies[pair];
    const float c = cosf(angle), s = sinf(angle);
    const float a = static_cast<float>(from[0]), b = static_cast<float>(from[half]);
    to[0] = static_cast<T>(a * c - b * s);
    to[half] = static_cast<T>(b * c + a * s);
  }
};

// y = silu(gate) * up, of rows [gate, up].
template <class T>
struct Swiglu {
  const T *both;
  int width;
  T *y;
  HOST_DEVICE void operator()(int i) const {
    const T *row = both + int64_t{i / width} * 2 * width + i % width;
    const float gate = static_cast<float>(row[0]);
    y[i] = static_cast<T>(gate / (1 + expf(-gate)) * static_cast<float>(row[width]));
  }
};
