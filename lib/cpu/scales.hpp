// The scale of a block, read for dequantize.
#pragma once

#include "core/decode.hpp"
#include "core/formats.hpp"
#include "problem.hpp"

namespace nf4::cpu {

inline float block_scale(const Weight &weight, int64_t block) {
  if (!weight.nested()) return static_cast<const float *>(weight.absmax)[block];
  const uint8_t code = static_cast<const uint8_t *>(weight.absmax)[block];
  return nested_scale(weight.nested_code[code],
                      weight.nested_absmax[block >> weight.nested_blocksize_log2],
                      *weight.nested_offset);
}

inline const float *codebook(const Weight &weight) {
  if (weight.codebook != nullptr) return weight.codebook;
  return weight.format == NF4_FORMAT_FP4 ? kFp4Codebook.data() : kNf4Codebook.data();
}

}  // namespace nf4::cpu
