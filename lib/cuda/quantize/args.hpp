// What the quantize kernels get, and how a family of them is described.
#pragma once

#include <cstdint>

#include "core/encode.hpp"
#include "cuda/family.hpp"
#include "nf4/nf4.h"

namespace nf4::cuda {

struct QuantizeArgs {
  const void *in;
  uint8_t *packed;
  float *scales;  // one per block: absmax if flat, scratch if nested
  int64_t elements;
  int64_t blocks;
  int blocksize_log2;
  bool aligned;           // in on 16 bytes and packed on 4
  const float *codebook;  // the caller's, in device memory; NULL: `quantizer` is ready
  Quantizer quantizer;
};

// The sum of scales, level by level: each launch sums runs of kScalesPerPartialSum.
struct SumArgs {
  const float *scales;
  double *partial_sums;
  int64_t blocks;
  int64_t partials;
  float *nested_offset;
};

struct QuantizeScalesArgs {
  const float *scales;
  const float *nested_code;
  const float *nested_offset;
  float *nested_absmax;
  uint8_t *codes;
  int64_t blocks;
  int64_t nested_blocks;
  int nested_blocksize_log2;
};

constexpr int kQuantizeThreads = 256;
constexpr int kQuantizeElementsPerBlock = 4096;  // the largest blocksize, so blocks are whole

struct QuantizeFamily {
  Family family;
  const void *weights[3];       // [dtype - 1]: QuantizeArgs
  const void *sum_scales;       // SumArgs
  const void *mean_scale;       // SumArgs, one thread block
  const void *quantize_scales;  // QuantizeScalesArgs
};

extern const QuantizeFamily kQuantizeBaseline;

}  // namespace nf4::cuda
