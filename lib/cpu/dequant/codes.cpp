#include "cpu/dequant/codes.hpp"

#include <algorithm>
#include <cstring>

#include "cpu/weight/scales.hpp"

namespace nf4::cpu {
namespace {

// Elements that are dequantized together in short blocks.
constexpr int64_t kPart = 512;
constexpr int64_t kMostBlocks = kPart / kMinBlocksize;

// Kernels for integers, in which the low nibble comes first, add these to entries. The sum of -0
// and -0 is -0.
struct NoZeros {
  float zeros[kMostBlocks];
  constexpr NoZeros() : zeros() {
    for (float &zero : zeros) zero = -0.0f;
  }
};
constexpr NoZeros kNoZeros;

}  // namespace

CodesDequantizer::CodesDequantizer(const DequantKernels &kernels, const Weight &weight,
                                   nf4_dtype dtype)
    : kernel_((weight.low_nibble_first() ? kernels.int4 : kernels.dequant)[dtype - 1]),
      low_first_(weight.low_nibble_first()),
      element_bytes_(element_bytes(dtype)) {
  std::transform(codebook(weight), codebook(weight) + kCodebookSize, codebook_, canonical);
}

void CodesDequantizer::operator()(DequantArgs args) const {
  args.codebook = codebook_;
  if (!low_first_) return kernel_(args);
  args.zeros = kNoZeros.zeros;
  for (int64_t left = args.elements; left > 0; left -= kPart) {
    args.elements = std::min(left, kPart);
    if (args.blocksize < kKernelStep)
      dequant_short_blocks(args);
    else
      kernel_(args);
    args.packed += kPart / 2;
    args.scales += kPart / args.blocksize;
    args.out = static_cast<char *>(args.out) + kPart * element_bytes_;
  }
}

// Dequantizes each step with the scale of its first block and with that of its second one, and
// takes a half of each.
void CodesDequantizer::dequant_short_blocks(const DequantArgs &args) const {
  float scales[2][kMostBlocks];
  const int64_t steps = args.elements / kKernelStep;
  for (int64_t i = 0; i < 2 * steps; ++i) scales[i % 2][i / 2] = args.scales[i];
  alignas(64) char second[kPart * sizeof(float)];
  DequantArgs of_half = args;
  of_half.blocksize = kKernelStep;
  of_half.scales = scales[0];
  kernel_(of_half);
  of_half.scales = scales[1];
  of_half.out = second;
  kernel_(of_half);
  const int64_t half = kShortBlocksize * element_bytes_;
  for (int64_t i = 0; i < steps; ++i)
    std::memcpy(static_cast<char *>(args.out) + (2 * i + 1) * half, second + (2 * i + 1) * half,
                half);
}

}  // namespace nf4::cpu
