// The arguments of the quantize kernel of integer weights. No CUDA types.
#pragma once

#include <cstdint>

#include "cuda/weight/int4_view.hpp"

namespace nf4::cuda {

constexpr int kInt4QuantizeThreads = 256;
constexpr int64_t kInt4CtaTilesFrom = 1024;  // columns of a group

struct Int4QuantizeArgs {
  const void *in;
  uint32_t *packed;
  uint16_t *scales;
  uint32_t *zeros;  // or NULL
  int64_t rows;
  int64_t cols;
  int64_t group_size;
  int64_t groups;
  uint32_t zero_offset;
  nf4_int4_layout layout;
  nf4_dtype scales_dtype;
  bool symmetric;
  bool aligned;    // in on a 16-byte boundary, cols a multiple of 8
  bool cta_tiles;  // a CTA handles eight rows of a group; otherwise a warp does
};

}  // namespace nf4::cuda
