#include "support/cases.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>

#include "core/scale_bytes.hpp"
#include "support/values.hpp"

namespace nf4::test {
namespace {

template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T> &values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Sets rows and columns whose product is `elements`. A divisor is looked for among small numbers.
void set_rows_and_cols(Rng &rng, nf4_tensor &shape, int64_t elements) {
  const int64_t rows = rng.between(1, 16);
  shape.rows = elements % rows == 0 ? rows : 1;
  shape.cols = elements / shape.rows;
}

int random_nested_blocksize(Rng &rng) {
  if (rng.one_in(2)) return 256;
  return 1 << (rng.one_in(4) ? rng.between(13, 30) : rng.between(0, 12));
}

nf4_sizes sizes_of(const nf4_tensor &shape) {
  nf4_sizes sizes{};
  sizes.struct_size = sizeof sizes;
  nf4_tensor_sizes(&shape, &sizes);
  return sizes;
}

}  // namespace

int part_alignment(Part part, bool nested) {
  return part == kPacked || (part == kAbsmax && nested) ? 1 : 4;
}

const char *part_name(Part part) {
  static const char *const names[] = {"packed",      "absmax",        "nested_absmax",
                                      "nested_code", "nested_offset", "codebook"};
  return names[part];
}

nf4_tensor HostWeight::at(const std::array<void *, kPartCount> &addresses) const {
  nf4_tensor tensor = shape;
  tensor.packed = addresses[kPacked];
  tensor.absmax = addresses[kAbsmax];
  tensor.nested_absmax = static_cast<float *>(addresses[kNestedAbsmax]);
  tensor.nested_code = static_cast<float *>(addresses[kNestedCode]);
  tensor.nested_offset = static_cast<float *>(addresses[kNestedOffset]);
  tensor.codebook = static_cast<float *>(addresses[kCodebook]);
  return tensor;
}

std::vector<CaseClass> case_classes() {
  std::vector<CaseClass> classes;
  for (const nf4_dtype dtype : kDtypes)
    for (const int blocksize : kBlocksizes)
      for (const bool nested : {false, true}) classes.push_back({dtype, blocksize, nested});
  return classes;
}

std::vector<CaseClass> byte_classes(nf4_dtype dtype) {
  return {{dtype, 32, false, NF4_FORMAT_MXFP4},
          {dtype, 16, false, NF4_FORMAT_NVFP4},
          {dtype, 32, false, NF4_FORMAT_NVFP4}};
}

CodebookKind random_codebook_kind(Rng &rng) {
  return codebook_kind(static_cast<int>(rng.below(kCodebookKindCount)));
}

CodebookKind random_own_codebook_kind(Rng &rng) {
  return codebook_kind(static_cast<int>(rng.between(kFormatCount, kCodebookKindCount - 1)));
}

int dtype_bytes(nf4_dtype dtype) { return dtype == NF4_DTYPE_FP32 ? 4 : 2; }

int64_t random_elements(Rng &rng, int blocksize, int64_t limit) {
  switch (rng.below(8)) {
    case 0:
      return rng.between(1, 70);
    case 1:
      return rng.between(1, 2) * blocksize;
    case 2:
      return std::max<int64_t>(1, rng.between(1, 3) * blocksize + rng.between(-3, 3));
    case 3:
      return rng.one_in(6) ? rng.between(1, limit) : rng.between(1, 3 * blocksize);
    default:
      return rng.between(1, std::max<int64_t>(1500, 3 * blocksize / 2));
  }
}

HostWeight random_shape(Rng &rng, const CaseClass &kind, CodebookKind codebook, int64_t elements,
                        int nested_blocksize) {
  HostWeight weight{};
  nf4_tensor &shape = weight.shape;
  shape.struct_size = sizeof shape;
  shape.format = format_of(codebook);
  shape.blocksize = kind.blocksize;
  if (kind.nested)
    shape.nested_blocksize =
        nested_blocksize != 0 ? nested_blocksize : random_nested_blocksize(rng);
  set_rows_and_cols(rng, shape, elements);

  const nf4_sizes sizes = sizes_of(shape);
  weight.bytes[kPacked].resize(sizes.packed_bytes);
  weight.bytes[kAbsmax].resize(sizes.absmax_bytes);
  if (kind.nested) {
    weight.bytes[kNestedAbsmax].resize(sizes.nested_blocks * sizeof(float));
    weight.bytes[kNestedCode] = bytes_of(random_scale_code(rng));
    weight.bytes[kNestedOffset].resize(sizeof(float));
  }
  weight.bytes[kCodebook] = bytes_of(random_codebook(rng, codebook));
  return weight;
}

HostWeight random_byte_weight(Rng &rng, const CaseClass &kind, int64_t rows, int64_t cols,
                              bool ordinary) {
  const bool mxfp4 = kind.byte_format == NF4_FORMAT_MXFP4;
  HostWeight weight{};
  nf4_tensor &shape = weight.shape;
  shape.struct_size = sizeof shape;
  shape.format = kind.byte_format;
  shape.blocksize = kind.blocksize;
  shape.rows = rows;
  shape.cols = cols;
  if (!mxfp4) {
    shape.nested_blocksize = rng.one_in(2) ? 0 : static_cast<int32_t>(rng.between(1, rows));
    shape.scale_rule = rng.one_in(2) ? NF4_GLOBAL_FACTOR : NF4_GLOBAL_DIVISOR;
  }
  const nf4_sizes sizes = sizes_of(shape);
  weight.bytes[kPacked].resize(sizes.packed_bytes);
  rng.fill(weight.bytes[kPacked].data(), weight.bytes[kPacked].size());
  weight.bytes[kAbsmax].resize(sizes.absmax_bytes);
  for (uint8_t &byte : weight.bytes[kAbsmax])
    // About 1, or 0.25 to 4. The smallest of 16 bits that is exact in fp16 is 2^-22.
    byte = static_cast<uint8_t>(mxfp4 ? rng.between(ordinary ? 125 : 105, ordinary ? 129 : 140)
                                      : rng.between(ordinary ? 40 : 0, ordinary ? 72 : 126));
  if (!ordinary)
    for (uint8_t &byte : weight.bytes[kAbsmax])
      if (rng.one_in(100)) byte = static_cast<uint8_t>(mxfp4 ? 255 : rng.between(127, 255));
  std::vector<float> globals(sizes.nested_blocks);
  for (float &global : globals) global = 0.5f + rng.uniform();
  weight.bytes[kNestedAbsmax] = bytes_of(globals);
  return weight;
}

float byte_scale_of(const nf4_tensor &weight, int64_t element) {
  const uint32_t byte = static_cast<const uint8_t *>(weight.absmax)[element / weight.blocksize];
  if (weight.format == NF4_FORMAT_MXFP4) return bits_float(e8m0_bits(byte));
  const int64_t row = element / weight.cols;
  const float global =
      weight.nested_absmax[weight.nested_blocksize == 0 ? 0 : row / weight.nested_blocksize];
  return global_scaled(e4m3_value(byte), global, weight.scale_rule == NF4_GLOBAL_DIVISOR);
}

DequantCase random_dequant_case(Rng &rng, const CaseClass &kind, CodebookKind codebook,
                                int64_t elements) {
  DequantCase result{kind.dtype, random_shape(rng, kind, codebook, elements)};
  HostWeight &weight = result.weight;
  rng.fill(weight.bytes[kPacked].data(), weight.bytes[kPacked].size());
  const auto scales = [&](Part part) {
    weight.bytes[part] = bytes_of(random_scales(rng, weight.bytes[part].size() / sizeof(float)));
  };
  if (kind.nested) {
    rng.fill(weight.bytes[kAbsmax].data(), weight.bytes[kAbsmax].size());
    scales(kNestedAbsmax);
    scales(kNestedOffset);
  } else {
    scales(kAbsmax);
  }
  return result;
}

QuantizeCase random_quantize_case(Rng &rng, const CaseClass &kind, CodebookKind codebook,
                                  int64_t elements) {
  QuantizeCase result{kind.dtype, {}, random_shape(rng, kind, codebook, elements), 0};
  const auto *entries = reinterpret_cast<const float *>(result.weight.bytes[kCodebook].data());
  if (!result.weight.has(kCodebook)) entries = nf4_codebook(result.weight.shape.format);
  result.in = random_input(rng, kind.dtype, kind.blocksize, elements, entries);
  nf4_quantize_workspace_size(&result.weight.shape, &result.workspace_bytes);
  return result;
}

std::string describe(const HostWeight &weight, nf4_dtype dtype, uint64_t stream) {
  const nf4_tensor &shape = weight.shape;
  std::ostringstream text;
  text << "NF4_TEST_SEED=" << run_seed() << " stream " << stream << ": "
       << (dtype == NF4_DTYPE_FP32   ? "fp32"
           : dtype == NF4_DTYPE_FP16 ? "fp16"
                                     : "bf16")
       << ", " << shape.rows << " x " << shape.cols << ", format " << shape.format << ", blocksize "
       << shape.blocksize << ", nested_blocksize " << shape.nested_blocksize
       << (weight.has(kCodebook) ? ", own codebook" : "");
  return text.str();
}

}  // namespace nf4::test
