// How a number becomes a code, by the rule of nf4.h. The CPU reference and every kernel use it. A
// codebook is turned into a Quantizer once; comparisons then find the code of a value.
#pragma once

#include <cstdint>

#include "core/decode.hpp"
#include "core/formats.hpp"
#include "core/macros.hpp"

namespace nf4 {

constexpr float kLargestFloat = 3.402823466e+38f;
constexpr float kSmallestNormal = 1.175494351e-38f;  // 2^-126

// A codebook prepared for search: the code of a normalised x is codes[number of thresholds below
// x], so a tie goes to the lower entry.
struct Quantizer {
  float thresholds[kCodebookSize - 1];  // ascending
  uint8_t codes[kCodebookSize];         // indexed by rank
};

// Halfway between two neighbours, rounded once (the halving is exact).
NF4_HOST_DEVICE constexpr float midpoint(float low, float high) {
  return multiply_rn(0.5f, add_rn(low, high));
}

// The sort order of codebook entries, NaN last. Equal entries (FP4 has +0 and -0) are in order of
// falling code. The last of them, which is the one used, therefore has the lowest code.
NF4_HOST_DEVICE constexpr bool entry_before(float a, int code_a, float b, int code_b) {
  const bool a_is_nan = a != a;
  const bool b_is_nan = b != b;
  if (a_is_nan != b_is_nan) return b_is_nan;
  if (a_is_nan) return code_a > code_b;
  return a < b || (a == b && code_a > code_b);
}

// Sorts the codebook and puts a threshold between neighbours. Among equal entries, all but the last
// get the threshold below them as the one above them too, which makes them unreachable.
NF4_HOST_DEVICE constexpr Quantizer make_quantizer(const float *codebook) {
  Quantizer quantizer{};
  float sorted[kCodebookSize] = {};
  for (int i = 0; i < kCodebookSize; ++i) {
    int slot = i;
    for (; slot > 0 && entry_before(codebook[i], i, sorted[slot - 1], quantizer.codes[slot - 1]);
         --slot) {
      sorted[slot] = sorted[slot - 1];
      quantizer.codes[slot] = quantizer.codes[slot - 1];
    }
    sorted[slot] = codebook[i];
    quantizer.codes[slot] = static_cast<uint8_t>(i);
  }
  float below = -kLargestFloat;
  for (int i = 0; i + 1 < kCodebookSize; ++i) {
    if (sorted[i] != sorted[i + 1]) below = midpoint(sorted[i], sorted[i + 1]);
    quantizer.thresholds[i] = below;
  }
  return quantizer;
}

NF4_HOST_DEVICE bool is_finite(float x) { return x >= -kLargestFloat && x <= kLargestFloat; }

// x| for the absmax of a block, which ignores elements that are not finite.
NF4_HOST_DEVICE float finite_magnitude(float x) {
  if (!is_finite(x)) return 0.0f;
  return x < 0 ? -x : x;
}

// The factor that normalises a block's elements. The lower bound keeps the reciprocal finite where
// a block is zero or subnormal.
NF4_HOST_DEVICE float inverse_scale(float absmax) {
  return divide_rn(1.0f, absmax > kSmallestNormal ? absmax : kSmallestNormal);
}

// x scaled to [-1, 1]; NaN becomes 0, and infinities become 1 and -1.
NF4_HOST_DEVICE float normalise(float x, float inverse) {
  if (is_finite(x)) return multiply_rn(x, inverse);
  return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f;
}

NF4_HOST_DEVICE uint32_t encode(const Quantizer &quantizer, float x, float inverse) {
  const float normalised = normalise(x, inverse);
  int rank = 0;
  for (int i = 0; i < kCodebookSize - 1; ++i) rank += normalised > quantizer.thresholds[i];
  return quantizer.codes[rank];
}

// Returns the entry of an ascending 256-entry code that is nearest to x; a tie goes to the lower
// one.
NF4_HOST_DEVICE uint8_t encode_scale(const float *code, float x) {
  int low = 0;
  for (int step = kScaleCodeSize / 2; step > 0; step /= 2) {
    const int middle = low + step;
    if (x > midpoint(code[middle - 1], code[middle])) low = middle;
  }
  return static_cast<uint8_t>(low);
}

}  // namespace nf4
