// What is computed element by element, alike on the CPU and the GPU: a backend's for_each calls
// such a function for 0, 1, ..., count - 1.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// The rows of a step: tokens at positions of sequences.
struct Rows {
  int32_t *token, *position, *sequence;
  int64_t count;
};

// A layer's keys and values: [sequence][kv_head][position][head_dim].
template <class T>
struct Cache {
  T *keys, *values;
  int64_t positions;
};

struct Heads {
  int64_t queries, keys, dim;
  HOST_DEVICE int64_t width() const { return (queries + 2 * keys) * dim; }
};

template <class T>
struct Embed {
  const T *table;
  const int32_t *token;
  int64_t hidden;
  T *x;
  HOST_DEVICE void operator()(int64_t i) const {
    x[i] = table[token[i / hidden] * hidden + i % hidden];
  }
};

// Rotary position embedding of q in place and of k into the cache, and v into the cache, of rows
// [q, k, v]; an element is a pair of columns, dim / 2 apart.
template <class T>
struct Rotate {
  T *qkv;
  Rows rows;
  Heads heads;
  Cache<T> cache;
  const float *frequencies;
  HOST_DEVICE void operator()(int64_t i) const {
    const int64_t half = heads.dim / 2, pair = i % half, all = heads.queries + 2 * heads.keys;
    const int64_t head = i / half % all, row = i / half / all;
    T *from = qkv + row * heads.width() + head * heads.dim + pair, *to = from;
    const bool is_value = head >= heads.queries + heads.keys;
    if (head >= heads.queries) {
      const int64_t cached = rows.sequence[row] * heads.keys + (head - heads.queries) % heads.keys;
      to = (is_value ? cache.values : cache.keys) +
           (cached * cache.positions + rows.position[row]) * heads.dim + pair;
    }
    const float angle = is_value ? 0 : static_cast<float>(rows.position[row]) * frequencies[pair];
    const float c = cosf(angle), s = sinf(angle);
    const float a = static_cast<float>(from[0]), b = static_cast<float>(from[half]);
    to[0] = static_cast<T>(a * c - b * s);
    to[half] = static_cast<T>(b * c + a * s);
  }
};

// Of rows [gate, up].
template <class T>
struct Swiglu {
  const T *both;
  int64_t width;
  T *y;
  HOST_DEVICE void operator()(int64_t i) const {
    const T *row = both + i / width * 2 * width + i % width;
    const float gate = static_cast<float>(row[0]);
    y[i] = static_cast<T>(gate / (1 + expf(-gate)) * static_cast<float>(row[width]));
  }
};
