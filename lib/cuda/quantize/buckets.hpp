// A codebook's thresholds as a table over [-1, 1] with an entry for each lane of a warp. Buckets of
// 1/16, each with at most one threshold, turn the search for a code into one look-up and one
// comparison.
#pragma once

#include <cstdint>
#include <iterator>

#include "core/encode.hpp"

namespace nf4::cuda {

// Bucket n is floor(v * 16), -17..16, since v may leave [-1, 1] by a rounding error. Entry i is for
// every n that equals i modulo 32, so that a shuffle finds it without a mask; two entries serve
// both ends.
constexpr int kBuckets = 32;
constexpr int kLastBucket = 16;
constexpr int kFirstBucket = -17;
constexpr float kBucketsPerUnit = 16.0f;
// 1.5 * 2^23: added to a small number, it puts the number, rounded by the addition, into the low
// bits of the sum as an integer.
constexpr float kIntegerInLowBits = 12582912.0f;

// The code at or below the threshold is in the highest nibble, and the code above it in the next.
struct alignas(8) Bucket {
  float threshold;
  uint32_t codes;
};

// Everything that a CTA needs of a codebook. It has whole cache lines, as all CTAs read the buckets
// at once.
struct alignas(128) Tables {
  Bucket buckets[kBuckets];
  Quantizer quantizer;
  bool crowded;  // the buckets cannot tell all codes apart, so the quantizer must be used
};

// The bucket of x, or one before or after all others. NaN counts as large, because nothing exceeds
// it. Thresholds in buckets before that of x are below x, and those after it are not.
NF4_HOST_DEVICE constexpr int bucket_number(float x) {
  if (!(x < 2.0f)) return kLastBucket + 1;
  if (x < -2.0f) return kFirstBucket - 1;
  const float scaled = multiply_rn(x, kBucketsPerUnit);  // exact
  const int towards_zero = static_cast<int>(scaled);
  const int number = towards_zero - (static_cast<float>(towards_zero) > scaled);
  if (number > kLastBucket) return kLastBucket + 1;
  return number < kFirstBucket ? kFirstBucket - 1 : number;
}

// Makes entry `index` of the table; sets *crowded if two different thresholds fall into it, or if
// any falls into the ends.
NF4_HOST_DEVICE constexpr Bucket make_bucket(const Quantizer &quantizer, int index, bool *crowded) {
  const int last = index <= kLastBucket ? index : index - kBuckets;
  const bool is_end = last >= kFirstBucket + kBuckets;
  const int first = is_end ? last - kBuckets : last;
  // Numbers in an end entry are near -1 or near 1, so any threshold between them works.
  Bucket bucket{is_end ? 0.0f : kLargestFloat, 0};
  int low = 0;
  int high = 0;
  bool found = false;
  for (int i = 0; i < kCodebookSize - 1; ++i) {
    const float threshold = quantizer.thresholds[i];
    const int number = bucket_number(threshold);
    if (number < first) low = i + 1;
    if (number <= last) high = i + 1;
    if (number != first && number != last) continue;
    if (is_end || (found && bucket.threshold != threshold)) *crowded = true;
    bucket.threshold = threshold;
    found = true;
  }
  bucket.codes = static_cast<uint32_t>(quantizer.codes[low]) << 28 |
                 static_cast<uint32_t>(quantizer.codes[high]) << 24;
  return bucket;
}

constexpr Tables make_tables(const Codebook &codebook) {
  Tables tables{};
  tables.quantizer = make_quantizer(codebook.data());
  for (int i = 0; i < kBuckets; ++i)
    tables.buckets[i] = make_bucket(tables.quantizer, i, &tables.crowded);
  return tables;
}

// Indexed by the rows of kFormats whose scales are floats.
struct FormatTables {
  Tables of[kFloatScaledFormats];
};

constexpr FormatTables make_format_tables() {
  FormatTables tables{};
  for (int row = 0; row < kFloatScaledFormats; ++row)
    tables.of[row] = make_tables(kFormats[row].codebook);
  return tables;
}

constexpr bool any_crowded(const FormatTables &tables) {
  for (const Tables &each : tables.of)
    if (each.crowded) return true;
  return false;
}
// Otherwise every weight of the format would take the slow path.
static_assert(!any_crowded(make_format_tables()));

}  // namespace nf4::cuda
