// Random quantized weights and random inputs to quantize, in plain host memory, so that a test can
// place them between guard pages or on a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "core/formats.hpp"
#include "nf4/nf4.h"
#include "support/random.hpp"

namespace nf4::test {

enum Part { kPacked, kAbsmax, kNestedAbsmax, kNestedCode, kNestedOffset, kCodebook, kPartCount };

// The alignment of its type that nf4.h requires of a part.
int part_alignment(Part part, bool nested);
const char *part_name(Part part);

// A weight without addresses, and the bytes of its parts; a part that it does not have is empty.
constexpr bool format_has_scale_bytes(nf4_format format) {
  return format == NF4_FORMAT_MXFP4 || format == NF4_FORMAT_NVFP4;
}

struct HostWeight {
  using Tensor = nf4_tensor;
  static constexpr int kParts = kPartCount;

  nf4_tensor shape;
  std::array<std::vector<uint8_t>, kPartCount> bytes;

  bool has_scale_bytes() const { return format_has_scale_bytes(shape.format); }
  bool nested() const { return shape.nested_blocksize != 0 && !has_scale_bytes(); }
  int64_t elements() const { return shape.rows * shape.cols; }
  bool has(int part) const { return !bytes[part].empty(); }
  int alignment(int part) const {
    return part_alignment(Part(part), nested() || has_scale_bytes());
  }
  // The weight whose parts are at `addresses`; NULL for a part that it does not have.
  nf4_tensor at(const std::array<void *, kPartCount> &addresses) const;
};

// The codebook of a format with float scales, by its row of kFormats, or a caller's.
enum class CodebookKind {
  kFp4 = format_row(NF4_FORMAT_FP4),
  kNf4 = format_row(NF4_FORMAT_NF4),
  kSorted = kFloatScaledFormats,  // 16 numbers in [-1, 1], ascending
  kShuffled,                      // the same in any order
  kDuplicates,                    // few distinct values, -0 and +0 among them
  kWild,                          // any bits: NaN, infinities, subnormals
};
constexpr int kFormatCount = kFloatScaledFormats;
constexpr int kCodebookKindCount = static_cast<int>(CodebookKind::kWild) + 1;

// A kind by its number; the formats' own come first.
constexpr CodebookKind codebook_kind(int i) { return static_cast<CodebookKind>(i); }
constexpr bool is_format(CodebookKind kind) { return kind < CodebookKind::kSorted; }
// The format of a tensor with such a codebook; with a caller's codebook it has no meaning.
constexpr nf4_format format_of(CodebookKind kind) {
  return is_format(kind) ? kFormats[static_cast<int>(kind)].id : NF4_FORMAT_NF4;
}
// Any of the formats' own, and any of the callers'.
CodebookKind random_codebook_kind(Rng &rng);
CodebookKind random_own_codebook_kind(Rng &rng);

constexpr nf4_dtype kDtypes[] = {NF4_DTYPE_FP32, NF4_DTYPE_FP16, NF4_DTYPE_BF16};
constexpr nf4_dtype kDtypes16[] = {NF4_DTYPE_FP16, NF4_DTYPE_BF16};
constexpr int kBlocksizes[] = {32, 64, 128, 256, 512, 1024, 2048, 4096};

struct CaseClass {
  nf4_dtype dtype;
  int blocksize;
  bool nested;
  nf4_format byte_format = 0;  // MXFP4 or NVFP4, instead of a codebook with flat or nested scales
};
// MXFP4 and NVFP4, in each of their blocksizes.
std::vector<CaseClass> byte_classes(nf4_dtype dtype);
// Every dtype x blocksize x flat/nested.
std::vector<CaseClass> case_classes();

int dtype_bytes(nf4_dtype dtype);

// A weight to dequantize: every part is filled in; in some cases with special scales (NaN,
// infinite, negative, subnormal).
struct DequantCase {
  nf4_dtype dtype;
  HostWeight weight;
  size_t out_bytes() const { return weight.elements() * dtype_bytes(dtype); }
};

// An input to quantize: the outputs have their sizes, and nested_code and codebook their contents.
struct QuantizeCase {
  nf4_dtype dtype;
  std::vector<uint8_t> in;
  HostWeight weight;
  size_t workspace_bytes;
};

// A number of elements with odd tails around block boundaries, from 1 to about 6000, and sometimes
// up to `limit`.
int64_t random_elements(Rng &rng, int blocksize, int64_t limit = 40000);

// nested_blocksize: 0 for a random one.
HostWeight random_shape(Rng &rng, const CaseClass &kind, CodebookKind codebook, int64_t elements,
                        int nested_blocksize = 0);
// MXFP4 or NVFP4. cols is a multiple of the blocksize. If not `ordinary`, scales are also NaN and
// negative where the format has such, and very large or small.
HostWeight random_byte_weight(Rng &rng, const CaseClass &kind, int64_t rows, int64_t cols,
                              bool ordinary);
// The scale of an element of MXFP4 or NVFP4.
float byte_scale_of(const nf4_tensor &weight, int64_t element);
DequantCase random_dequant_case(Rng &rng, const CaseClass &kind, CodebookKind codebook,
                                int64_t elements);
QuantizeCase random_quantize_case(Rng &rng, const CaseClass &kind, CodebookKind codebook,
                                  int64_t elements);

// Describes the case, for the message of a failure.
std::string describe(const HostWeight &weight, nf4_dtype dtype, uint64_t stream);

}  // namespace nf4::test
