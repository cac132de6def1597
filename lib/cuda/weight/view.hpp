// The description of a weight with a codebook that its kernels get. No CUDA types, so that
// arguments are filled in ordinary C++.
#pragma once

#include <cstdint>

#include "core/formats.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// How scales are stored: an index of tables of kernels.
enum ScaleKind { kFlatScales, kNestedScales, kByteScales, kScaleKindCount };
inline ScaleKind scale_kind(const Weight &weight) {
  if (weight.has_scale_bytes()) return kByteScales;
  // A weight without elements has no scales of either kind.
  return weight.nested() && weight.elements != 0 ? kNestedScales : kFlatScales;
}

// The first member of each kernel's args. Everything that takes a `const WeightView &` on the
// device is inlined, so that its fields stay in the constant bank.
struct WeightView {
  const uint8_t *packed;
  const void *absmax;  // float if flat, else uint8_t
  const float *nested_absmax;
  const float *nested_code;
  const float *nested_offset;
  const float *codebook;  // NULL: the format's own codebook
  int64_t rows;
  int64_t cols;
  int32_t format_row;  // row of kFormats
  int32_t blocksize_log2;
  int32_t nested_blocksize_log2;  // -1 unless nested
  ScaleBytes scale_bytes;         // kNone unless MXFP4 or NVFP4
  bool global_divides;            // the global scales, those of NVFP4, divide
  int64_t global_blocks;          // blocks that share a global scale; 0 if there is none
};

inline WeightView view_of(const Weight &weight) {
  return {weight.packed,
          weight.absmax,
          weight.nested_absmax,
          weight.nested_code,
          weight.nested_offset,
          weight.codebook,
          weight.rows,
          weight.cols,
          format_row(weight.format),
          weight.blocksize_log2,
          weight.nested_blocksize_log2,
          weight.scale_bytes,
          weight.global_divides(),
          weight.global_blocks};
}

}  // namespace nf4::cuda
