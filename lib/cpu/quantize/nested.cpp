// Quantizes scales. Cost: a scale is read twice and its code written once, 9 bytes for 64 weights,
// from the L2 or L3 cache. The search for a code, 8 dependent steps of a load and a compare, is the
// bound: 0.9 ms for the 262144 scales of 4096 x 4096 on one core of a Zen 4 at 3.7 GHz.
#include "cpu/quantize/nested.hpp"

#include <algorithm>
#include <array>

#include "core/encode.hpp"
#include "core/float16.hpp"
#include "cpu/parallel.hpp"
#include "cpu/reference.hpp"

namespace nf4::cpu {
namespace {

// The work that is worth a thread, about 50 microseconds.
constexpr int64_t kSummedPerThread = 1 << 17;
constexpr int64_t kEncodedPerThread = 1 << 14;

// tree_sum of a complete subtree, a level at a time.
double subtree_sum(const float *values) {
  constexpr int64_t kHalf = kScalesPerPartialSum / 2;
  double sums[kHalf];
  for (int64_t i = 0; i < kHalf; ++i) sums[i] = double{values[2 * i]} + values[2 * i + 1];
  for (int64_t width = kHalf / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  return sums[0];
}

double parallel_tree_sum(const float *values, int64_t count, double *partial_sums, int threads) {
  const int64_t partials = (count + kScalesPerPartialSum - 1) / kScalesPerPartialSum;
  parallel_for(partials, kSummedPerThread / kScalesPerPartialSum, threads,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const float *first = values + i * kScalesPerPartialSum;
                   const int64_t left = count - i * kScalesPerPartialSum;
                   partial_sums[i] =
                       left >= kScalesPerPartialSum ? subtree_sum(first) : tree_sum(first, left);
                 }
               });
  return tree_sum(partial_sums, partials);
}

// The thresholds of the entries: a scale, brought to [-1, 1], must exceed entry i to get code i.
std::array<float, kScaleCodeSize> code_thresholds(const float *code) {
  std::array<float, kScaleCodeSize> thresholds{};
  for (int i = 1; i < kScaleCodeSize; ++i) thresholds[i] = midpoint(code[i - 1], code[i]);
  return thresholds;
}

// The largest |scales[i] - offset|. Scales are finite, and so are the differences. The bits of
// magnitudes have the order of the magnitudes, and compilers vectorise a maximum of integers.
float largest_difference(const float *scales, int64_t count, float offset) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = float_bits(add_rn(scales[i], -offset)) & 0x7fffffffu;
    largest = std::max(largest, static_cast<int32_t>(bits));
  }
  return bits_float(static_cast<uint32_t>(largest));
}

}  // namespace

void quantize_scales(const QuantizeKernels &kernels, const Weight &weight, const float *scales,
                     double *partial_sums, int threads) {
  const double sum = parallel_tree_sum(scales, weight.blocks, partial_sums, threads);
  const float offset = static_cast<float>(sum / static_cast<double>(weight.blocks));
  *weight.nested_offset = offset;
  const auto thresholds = code_thresholds(weight.nested_code);
  uint8_t *codes = static_cast<uint8_t *>(weight.absmax);
  const int64_t grain = std::max<int64_t>(1, kEncodedPerThread >> weight.nested_blocksize_log2);
  parallel_for(weight.nested_blocks, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t nested = begin; nested < end; ++nested) {
      const int64_t first = nested << weight.nested_blocksize_log2;
      const int64_t count = std::min(weight.nested_blocksize(), weight.blocks - first);
      const float absmax = largest_difference(scales + first, count, offset);
      weight.nested_absmax[nested] = absmax;
      kernels.encode_scales(
          {thresholds.data(), scales + first, count, offset, inverse_scale(absmax), codes + first});
    }
  });
}

}  // namespace nf4::cpu
