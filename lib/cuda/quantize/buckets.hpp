// A codebook's thresholds as a table over [-1, 1]: 32 buckets of 1/16, each with at most
// one threshold in it, turn the search for a code into one lookup and one comparison.
#pragma once

#include <cstdint>

#include "core/encode.hpp"

namespace nf4::cuda {

constexpr int kBuckets = 64;  // 33 in use, and one for what rounding puts below -1

// Codes of a bucket: in the low nibble at or below the threshold, in the next above it.
struct alignas(8) Bucket {
  float threshold;
  uint32_t codes;
};

// All that a thread block needs of a codebook.
struct Tables {
  Bucket buckets[kBuckets];
  Quantizer quantizer;
  bool crowded;  // some bucket has two thresholds, so only the quantizer can be used
};

// The byte offset of the entry for x, which is at most a rounding error outside [-1, 1].
// x + 3 lies in [2, 4], so the five mantissa bits below its exponent count sixteenths. Just
// below -1 the offset wraps to that of the last entry, at 1 it is that of entry 32.
NF4_HOST_DEVICE uint32_t bucket_offset(uint32_t bits_of_x_plus_3) {
  return bits_of_x_plus_3 >> 15 & (kBuckets - 1) * sizeof(Bucket);
}

// Buckets in the order of x: entry 63 (below -1) first. A threshold outside [-1, 1] gets a
// place before or after all of them. Rounding is monotonic, so thresholds in buckets
// before that of x are below x, and those after it are not.
NF4_HOST_DEVICE constexpr int bucket_order(float x) {
  const float shifted = add_rn(x, 3.0f);
  if (shifted < 1.9999f) return -1;
  if (shifted < 2.0f) return 0;
  if (!(shifted < 4.0625f)) return kBuckets;
  return 1 + static_cast<int>((shifted - 2.0f) * 16.0f);  // exact, then rounded down
}

// Entry `index` of the table; sets *crowded if two different thresholds fall into it.
NF4_HOST_DEVICE constexpr Bucket make_bucket(const Quantizer &quantizer, int index, bool *crowded) {
  const int order = (index + 1) % kBuckets;
  Bucket bucket{kLargestFloat, 0};
  int low = 0;
  int high = 0;
  for (int i = 0; i < kCodebookSize - 1; ++i) {
    const float threshold = quantizer.thresholds[i];
    const int place = bucket_order(threshold);
    if (place < order) low = i + 1;
    if (place <= order) high = i + 1;
    if (place != order) continue;
    if (bucket.threshold != kLargestFloat && bucket.threshold != threshold) *crowded = true;
    bucket.threshold = threshold;
  }
  bucket.codes = quantizer.codes[low] | static_cast<uint32_t>(quantizer.codes[high]) << 4;
  return bucket;
}

constexpr Tables make_tables(const Codebook &codebook) {
  Tables tables{};
  tables.quantizer = make_quantizer(codebook.data());
  for (int i = 0; i < kBuckets; ++i)
    tables.buckets[i] = make_bucket(tables.quantizer, i, &tables.crowded);
  return tables;
}

// Else every weight of the format would take the slow path.
static_assert(!make_tables(kNf4Codebook).crowded && !make_tables(kFp4Codebook).crowded);

}  // namespace nf4::cuda
