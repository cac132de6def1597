// Dequantizes codes of a weight with the kernel for its order of nibbles, also in blocks that are
// shorter than a step of the kernels.
#pragma once

#include "core/formats.hpp"
#include "cpu/dequant/kernels.hpp"
#include "problem.hpp"

namespace nf4::cpu {

class CodesDequantizer {
 public:
  // The most scales of so many elements, which need not begin with a block.
  static constexpr int64_t max_scales(int64_t elements) { return elements / kShortBlocksize + 2; }

  CodesDequantizer(const DequantKernels &kernels, const Weight &weight, nf4_dtype dtype);

  // Dequantizes as a kernel of DequantKernels does, and ignores the codebook of args.
  void operator()(DequantArgs args) const;

 private:
  static constexpr int64_t kShortBlocksize = 16;

  void dequant_short_blocks(const DequantArgs &args) const;

  void (*const kernel_)(const DequantArgs &);
  const bool low_first_;
  const int64_t element_bytes_;
  float codebook_[kCodebookSize];
};

}  // namespace nf4::cpu
