// What the first CTAs of a skinny kernel make for the others: x A^T. No device code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/lora/args.hpp"

namespace nf4::cuda {

constexpr int kLoraProducerRanks = 32;  // that a producer multiplies at a time
constexpr int kLoraParts = 4;           // of the columns
constexpr int64_t kMaxLoraConsumers = 256;
constexpr int kMaxLoraProducerM = 16;

// CTAs that make the product: one for each part of the columns, or several that share the ranks,
// so that none reads more than about 256 KB of A.
constexpr int lora_producers(int64_t a_bytes, int rank) {
  const int chunks = (rank + kLoraProducerRanks - 1) / kLoraProducerRanks;
  const int64_t groups = (a_bytes + (1 << 20) - 1) >> 20;
  return kLoraParts * static_cast<int>(std::min<int64_t>(chunks, std::max<int64_t>(groups, 1)));
}

// Those of `ctas` CTAs that are left, which start after the producers.
constexpr int64_t lora_consumers(int64_t ctas, int producers) {
  if (producers == 0) return ctas;
  return std::min(kMaxLoraConsumers, std::max(ctas - producers, ctas / 2));
}

// Numbers between rows of the product in a consumer's shared memory, so that eight rows lie in
// different banks.
constexpr int kLoraPadding = 4;

// Bytes of a consumer's shared memory: which warp receives the product, and the product.
constexpr int64_t lora_consumer_bytes(int64_t m, int stride) {
  return stride == 0 ? 0 : 16 + m * (stride + kLoraPadding) * 4;
}

struct LoraProducerArgs {
  const void *x;
  int64_t x_stride;
  int64_t m;
  int64_t cols;
  LoraFactor in;  // A
  float scale;
  int rank;
  int stride;  // of a row of the product: whole sixteens of ranks
  int ctas;
  bool vectors;     // rows of x and A load as vectors of eight
  void *product;    // [m][rank], or NULL
  float *parts;     // [part of the columns][m][stride]
  uint64_t *flags;  // [consumer][producer]: the signature, once the producer's parts are there
  uint64_t signature;
};

}  // namespace nf4::cuda
