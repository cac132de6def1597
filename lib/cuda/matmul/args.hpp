// What a matmul kernel gets, and how a family of them is described. No device code, so that
// the selection is ordinary C++.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "core/rounding.hpp"
#include "cuda/runtime/family.hpp"
#include "cuda/runtime/launch.hpp"
#include "nf4/nf4.h"
#include "problem.hpp"

namespace nf4::cuda {

struct MatmulArgs {
  const uint8_t *packed;
  const void *absmax;  // float if flat, uint8_t if nested
  const float *nested_absmax;
  const float *nested_code;
  const float *nested_offset;
  const float *codebook;  // NULL: the format's own
  const void *x;
  const void *bias;  // or NULL
  void *y;
  int64_t m;
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  int64_t y_stride;
  nf4_format format;
  int blocksize_log2;
  int nested_blocksize_log2;
  bool x_vectors;   // rows of x are on 16-byte boundaries
  bool whole_runs;  // cols is a multiple of 32, and packed is on a 16-byte boundary
};

// Are rows of x, of 16-bit elements, on 16-byte boundaries?
inline bool has_x_vectors(const MatmulProblem &problem) {
  return is_multiple(problem.x, 16) && (problem.m == 1 || problem.x_stride % 8 == 0);
}

// Quotients of numbers below 1024 by one that the host knows: a product and a shift.
constexpr int kInverseShift = 22;
constexpr uint32_t inverse_of(int64_t divisor) {
  return static_cast<uint32_t>(((int64_t{1} << kInverseShift) + divisor - 1) / divisor);
}

// A format's own codebook in x's dtype.
inline RoundedCodebook rounded_codebook(nf4_format format, nf4_dtype dtype) {
  if (format == NF4_FORMAT_FP4) return dtype == NF4_DTYPE_BF16 ? kFp4InBf16 : kFp4InHalf;
  return dtype == NF4_DTYPE_BF16 ? kNf4InBf16 : kNf4InHalf;
}

// The same in fp16, for weights that are rounded after they are multiplied by their scale.
inline RoundedCodebook codebook_with_one(nf4_format format) {
  return format == NF4_FORMAT_FP4 ? kFp4InHalfWithOne : kNf4InHalfWithOne;
}

// Which of a family's kernels: for any problem; or, in thread blocks that own rows of the
// weight, for up to 2, 8 and 16 rows of x. On Hopper also in tiles of so many rows of x, which
// are no family's (wide.hpp); kStream... are those in which all blocks share some of the tiles.
enum MatmulShape {
  kTiled,
  kFew2,
  kFew8,
  kFew16,
  kWide16Tall,
  kWide32Tall,
  kWide64Tall,
  kWide64,
  kWide128,
  kWide152,
  kWide176,
  kWide208,
  kWide256,
  kWide272,
  kWide304,
  kStream128,
  kStream152,
  kStream176,
  kStream208,
  kStream256,
  kStream272,
  kStream304
};
constexpr int kMatmulShapes = kStream304 + 1;
constexpr int kFamilyShapes = kFew16 + 1;

// The tiles of kTiled.
constexpr int kTiledRows = 64;  // of the weight
constexpr int kTiledM = 64;     // of x
constexpr int kTiledThreads = 256;

struct MatmulFamily {
  Family family;
  bool tensor_maps;  // the few-row kernels copy by them
  // [fp16, bf16][nested][shape]; NULL: the family has none. kTiled gets a MatmulArgs, the few-row
  // kernels a FewArgs.
  const void *kernels[2][2][kFamilyShapes];
  // The same for several weights in one launch, each a FewBatch; NULL for kTiled.
  const void *batches[2][2][kFamilyShapes];
};

extern const MatmulFamily kMatmulSm90;
extern const MatmulFamily kMatmulSm80;
extern const MatmulFamily kMatmulSm75;

}  // namespace nf4::cuda
