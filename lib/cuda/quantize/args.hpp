// What the quantize kernels get, and how a family of them is described.
#pragma once

#include <cstdint>

#include "cuda/family.hpp"
#include "cuda/quantize/buckets.hpp"
#include "nf4/nf4.h"

namespace nf4::cuda {

struct QuantizeArgs {
  const void *in;
  uint8_t *packed;
  float *scales;  // one per block: absmax if flat, scratch if nested
  int64_t elements;
  int64_t blocks;
  int blocksize_log2;
  bool aligned;           // in on 16 bytes and packed on 8
  const float *codebook;  // NULL: the format's own
  nf4_format format;
};

// The sum of the scales, in levels: a launch turns each run of kScalesPerPartialSum into
// one sum, and further ones reduce those until a thread block can add the rest.
struct SumArgs {
  const float *scales;
  double *sums;
  int64_t count;  // of scales, or for reduce_sums of sums
};

struct QuantizeScalesArgs {
  const float *scales;
  const double *sums;
  int sums_count;  // at most kScalesPerPartialSum
  const float *nested_code;
  float *nested_offset;
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
  const void *reduce_sums;      // SumArgs, one thread block
  const void *quantize_scales;  // QuantizeScalesArgs
};

extern const QuantizeFamily kQuantizeBaseline;

}  // namespace nf4::cuda
