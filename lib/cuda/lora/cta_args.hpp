// What a skinny kernel's first CTAs (lora CTAs) make for the others (weight CTAs): x A^T. No device
// code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/lora/args.hpp"

namespace nf4::cuda {

constexpr int kLoraCtaM = 16;      // rows of x at most
constexpr int kLoraCtaRanks = 32;  // that a lora CTA multiplies at a time
constexpr int kLoraParts = 4;      // of the columns
constexpr int64_t kMaxWeightCtas = 256;

constexpr int lora_rank_chunks(int rank) { return (rank + kLoraCtaRanks - 1) / kLoraCtaRanks; }

constexpr int most_lora_ctas(int rank) { return kLoraParts * lora_rank_chunks(rank); }

// One for each part of the columns; for each MB of A as many more, between which the chunks of
// ranks are divided.
constexpr int lora_ctas(int64_t a_bytes, int rank) {
  const int64_t groups = std::max<int64_t>((a_bytes + (1 << 20) - 1) >> 20, 1);
  return kLoraParts * static_cast<int>(std::min<int64_t>(lora_rank_chunks(rank), groups));
}

// What the lora CTAs leave of a GPU's multiprocessors, but half of them at least: weight CTAs may
// start later than lora CTAs, which wait for none of them.
constexpr int64_t weight_ctas(int64_t multiprocessors, int lora_ctas) {
  if (lora_ctas == 0) return multiprocessors;
  return std::min(kMaxWeightCtas, std::max(multiprocessors - lora_ctas, (multiprocessors + 1) / 2));
}

// Numbers between rows of the product in shared memory, so that eight rows lie in different banks.
constexpr int kLoraPadding = 4;

// Bytes of a weight CTA's shared memory: which warp receives the product, and the product.
constexpr int64_t shared_lora_bytes(int64_t m, int stride) {
  return stride == 0 ? 0 : 16 + m * (stride + kLoraPadding) * 4;
}

struct LoraCtaArgs : LoraProductOperands {
  int ctas;         // 0: lora_product has made the product, in `scaled`; else that is unused
  float *parts;     // [part of the columns][m][stride]
  uint64_t *flags;  // [weight CTA][lora CTA]: the signature, once the lora CTA's parts are there
  uint64_t signature;
};

}  // namespace nf4::cuda
