// The meaning of a weight's codes and scales to the CPU kernels: its codebook, and the scale of a
// block.
#pragma once

#include <algorithm>

#include "core/decode.hpp"
#include "core/float16.hpp"
#include "core/formats.hpp"
#include "problem.hpp"

namespace nf4::cpu {

// The scales of `count` blocks of MXFP4 or NVFP4 from `first` on.
inline void read_scale_bytes(const Weight &weight, int64_t first, int64_t count, float *scales) {
  const uint8_t *bytes = static_cast<const uint8_t *>(weight.absmax) + first;
  if (weight.scale_bytes == ScaleBytes::kE8M0) {
    for (int64_t i = 0; i < count; ++i) scales[i] = bits_float(e8m0_bits(bytes[i]));
    return;
  }
  for (int64_t i = 0; i < count;) {
    const int64_t part = (first + i) / weight.global_blocks;
    const int64_t end = std::min(count, (part + 1) * weight.global_blocks - first);
    for (; i < end; ++i)
      scales[i] =
          global_scaled(e4m3_value(bytes[i]), weight.nested_absmax[part], weight.global_divides());
  }
}

inline float block_scale(const Weight &weight, int64_t block) {
  if (weight.has_scale_bytes()) {
    float scale;
    read_scale_bytes(weight, block, 1, &scale);
    return scale;
  }
  if (!weight.nested()) return static_cast<const float *>(weight.absmax)[block];
  const uint8_t code = static_cast<const uint8_t *>(weight.absmax)[block];
  return nested_scale(weight.nested_code[code],
                      weight.nested_absmax[block >> weight.nested_blocksize_log2],
                      *weight.nested_offset);
}

// Computes the scales of some blocks of one nested block.
using NestedScales = void (*)(const uint8_t *codes, int64_t count, const float *table, float absmax,
                              float offset, float *scales);

inline void nested_scales(const uint8_t *codes, int64_t count, const float *table, float absmax,
                          float offset, float *scales) {
  for (int64_t i = 0; i < count; ++i) scales[i] = table[codes[i]];
  for (int64_t i = 0; i < count; ++i) scales[i] = add_rn(multiply_rn(scales[i], absmax), offset);
}

// Computes the scales of `count` blocks from `first` on, with a kernel if there is one.
inline void read_scales(const Weight &weight, int64_t first, int64_t count, float *scales,
                        NestedScales kernel = nullptr) {
  if (weight.has_scale_bytes()) return read_scale_bytes(weight, first, count, scales);
  if (!weight.nested()) {
    const float *absmax = static_cast<const float *>(weight.absmax) + first;
    std::copy(absmax, absmax + count, scales);
    return;
  }
  const uint8_t *codes = static_cast<const uint8_t *>(weight.absmax) + first;
  for (int64_t i = 0; i < count;) {
    const int64_t nested = (first + i) >> weight.nested_blocksize_log2;
    const int64_t end = std::min(count, ((nested + 1) << weight.nested_blocksize_log2) - first);
    (kernel != nullptr ? kernel : nested_scales)(codes + i, end - i, weight.nested_code,
                                                 weight.nested_absmax[nested],
                                                 *weight.nested_offset, scales + i);
    i = end;
  }
}

// A NaN becomes the canonical one, as DequantArgs requires. Integer instructions are used, since
// compilers vectorise them.
inline float canonical(float x) {
  const uint32_t bits = float_bits(x);
  return bits_float((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : bits);
}

inline const float *codebook(const Weight &weight) {
  if (weight.codebook != nullptr) return weight.codebook;
  return kFormats[format_row(weight.format)].codebook.data();
}

}  // namespace nf4::cpu
