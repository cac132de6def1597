// The arguments of the quantize kernels.
#pragma once

#include <cstdint>

#include "core/formats.hpp"
#include "cuda/weight/view.hpp"
#include "nf4/nf4.h"
#include "problem.hpp"

namespace nf4::cuda {

struct QuantizeArgs {
  const void *in;
  uint8_t *packed;
  float *scales;         // one per block: absmax if flat, workspace if nested
  double *partial_sums;  // one per CTA, the sum of its scales; NULL if flat
  int64_t elements;
  int blocksize_log2;
  bool aligned;        // in on a 16-byte and packed on a 4-byte boundary
  uint8_t format_row;  // row of kFormats; here, as parameters from 0x240 on miss the constant cache
  const float *codebook;  // NULL: the format's own codebook
};

// The weight's scales are in `scales`, and its codes in `packed`.
struct E2m1QuantizeArgs {
  WeightView weight;
  const void *in;
  uint8_t *packed;
  uint8_t *scales;
  int64_t elements;
  int32_t scale_rule;
  bool aligned;  // in on a 16-byte and packed on a 4-byte boundary
};

// One level of the sum of the scales: each run of kSumsPerSum sums becomes one.
struct SumArgs {
  const double *sums;
  double *out;
  int64_t count;
};

struct QuantizeScalesArgs {
  const float *scales;
  const double *sums;
  int64_t sums_count;  // at most kSumsPerSum
  const float *nested_code;
  float *nested_offset;
  float *nested_absmax;
  uint8_t *codes;
  bool codes_aligned;  // on an 8-byte boundary
  int64_t blocks;
  int64_t nested_blocks;
  int nested_blocksize_log2;
};

constexpr int kQuantizeThreads = 128;
constexpr int kQuantizeCtaTile = kElementsPerPartialSum;
static_assert(kQuantizeCtaTile % kMaxBlocksize == 0, "a CTA has whole blocks");

constexpr int kScalesThreads = 1024;
constexpr int kChunkLog2 = 8;  // nested blocks of up to 2^8 scales use a warp each

}  // namespace nf4::cuda
