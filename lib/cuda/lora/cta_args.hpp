// The arguments and sizes of the product x A^T that the first CTAs of a skinny kernel (lora CTAs)
// compute for the others (weight CTAs). No device code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/lora/args.hpp"

namespace nf4::cuda {

constexpr int kLoraCtaM = 16;      // rows of x at most
constexpr int kLoraCtaRanks = 32;  // ranks that a lora CTA multiplies at a time
constexpr int kLoraParts = 4;      // parts of the columns
constexpr int64_t kMaxWeightCtas = 256;

constexpr int lora_rank_chunks(int rank) { return (rank + kLoraCtaRanks - 1) / kLoraCtaRanks; }

constexpr int most_lora_ctas(int rank) { return kLoraParts * lora_rank_chunks(rank); }

// There is one CTA for each part of the columns. Each further MB of A adds as many; they divide the
// chunks of ranks among them.
constexpr int lora_ctas(int64_t a_bytes, int rank) {
  const int64_t groups = std::max<int64_t>((a_bytes + (1 << 20) - 1) >> 20, 1);
  return kLoraParts * static_cast<int>(std::min<int64_t>(lora_rank_chunks(rank), groups));
}

// The multiprocessors that the lora CTAs leave, but at least half of them: weight CTAs may start
// later than lora CTAs, which do not wait for them.
constexpr int64_t weight_ctas(int64_t multiprocessors, int lora_ctas) {
  if (lora_ctas == 0) return multiprocessors;
  return std::min(kMaxWeightCtas, std::max(multiprocessors - lora_ctas, (multiprocessors + 1) / 2));
}

// Padding between rows of the product in shared memory, in numbers, so that eight rows lie in
// different banks.
constexpr int kLoraPadding = 4;

// The shared memory of a weight CTA, in bytes: the warp that receives the product, and the product.
constexpr int64_t shared_lora_bytes(int64_t m, int stride) {
  return stride == 0 ? 0 : 16 + m * (stride + kLoraPadding) * 4;
}

struct LoraCtaArgs : LoraProductOperands {
  int ctas;  // 0: lora_product has computed the product into `scaled`, which is otherwise unused
  float *parts;  // [part of the columns][m][stride]
  // [weight CTA][lora CTA]: becomes the signature once the lora CTA's parts are stored.
  uint64_t *flags;
  uint64_t signature;
};

}  // namespace nf4::cuda
