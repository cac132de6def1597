// A weight's codebook in bf16. Rounding a caller's codebook takes 12 us, for which a matmul waits,
// so the rounded codebooks of the last few calls are kept.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "core/float16.hpp"
#include "core/formats.hpp"
#include "core/round_codebook.hpp"
#include "cpu/matmul/parts.hpp"
#include "cpu/weight/scales.hpp"

namespace nf4::cpu {
namespace {

bool same_entries(const float *a, const float *b) {
  return std::memcmp(a, b, sizeof(Codebook)) == 0;
}

// A call that finds the cache in use rounds for itself. Initialisation is constant and nothing is
// thread_local, so nothing here allocates (status.cpp says why).
class RoundedCodebooks {
 public:
  RoundedCodebook operator()(const float *entries) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) return round_codebook<BFloat16>(entries);
    for (int i = 0; i < count_; ++i)
      if (same_entries(entries, kept_[i].entries)) return kept_[i].rounded;
    Kept &kept = kept_[oldest_];
    std::copy_n(entries, kCodebookSize, kept.entries);
    kept.rounded = round_codebook<BFloat16>(entries);
    oldest_ = (oldest_ + 1) % kMost;
    count_ = std::min(count_ + 1, kMost);
    return kept.rounded;
  }

 private:
  static constexpr int kMost = 8;
  struct Kept {
    float entries[kCodebookSize];
    RoundedCodebook rounded;
  };

  std::mutex mutex_;
  int count_ = 0;
  int oldest_ = 0;
  Kept kept_[kMost] = {};
};
RoundedCodebooks rounded_codebooks;

// Moves the power of two of the unit to the entries, so that products with x overflow only if those
// with the codebook do. bf16 holds all entries of an ordinary codebook.
RoundedCodebook near_one(RoundedCodebook codebook) {
  const int power = std::ilogb(codebook.unit);
  codebook.unit = std::ldexp(codebook.unit, -power);
  for (uint16_t &entry : codebook.entries)
    entry = from_float<BFloat16>(std::ldexp(bf16_to_float(entry), power)).bits;
  return codebook;
}

// Moves powers of two from all entries to the unit, up to 2^12: a scale of x is at most 2^115.
SplitCodebook without_common_factor(SplitCodebook split) {
  constexpr float kMostUnit = 0x1p12f;
  const auto is_even = [](int16_t entry) { return entry % 2 == 0; };
  while (split.unit < kMostUnit &&
         std::all_of(split.entries, split.entries + kCodebookSize, is_even)) {
    for (int16_t &entry : split.entries) entry /= 2;
    split.unit *= 2;
  }
  for (const int16_t entry : split.entries)
    split.largest = std::max(split.largest, std::abs(entry));
  return split;
}

}  // namespace

RoundedCodebook codebook_in_bf16(const Weight &weight) {
  const float *entries = codebook(weight);
  // bitsandbytes passes the codebooks of its formats along; the formats' own roundings are better.
  for (const Format &format : kFormats)
    if (same_entries(entries, format.codebook.data())) return format.bf16;
  return near_one(rounded_codebooks(entries));
}

SplitCodebook split_codebook(const uint16_t *bf16_entries) {
  constexpr int kBits = 13;
  // Between these limits, the unit times a scale of x is a normal number (split_loops.hpp).
  constexpr float kLeast = 0x1p-21f, kMost = 0x1p27f;
  float largest = 0;
  for (int i = 0; i < kCodebookSize; ++i)
    largest = std::max(largest, std::fabs(bf16_to_float(bf16_entries[i])));
  if (largest < kLeast || largest >= kMost) return {};
  SplitCodebook split{};
  split.unit = std::ldexp(1.0f, std::ilogb(largest) + 1 - kBits);
  for (int i = 0; i < kCodebookSize; ++i) {
    const float entry = bf16_to_float(bf16_entries[i]) / split.unit;
    split.entries[i] = static_cast<int16_t>(entry);
    if (split.entries[i] != entry) return {};
  }
  return without_common_factor(split);
}

}  // namespace nf4::cpu
