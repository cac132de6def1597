#include "validate.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <iterator>

#include "core/formats.hpp"
#include "status.hpp"
#include "validate_parts.hpp"

namespace nf4 {
namespace {

nf4_status invalid_format(nf4_format id) {
  char known[32 * std::size(kFormats)] = "";
  int length = 0;
  for (const Format &format : kFormats)
    length += std::snprintf(known + length, sizeof known - length, "%s%d (%.8s)",
                            length == 0 ? "" : " or ", format.id, format.name);
  return invalid("format", id, known);
}

bool is_power_of_two(int64_t x) { return x > 0 && (x & (x - 1)) == 0; }

nf4_status validate_float_scales(const nf4_tensor &tensor) {
  if (!is_power_of_two(tensor.blocksize) || tensor.blocksize < kMinBlocksize ||
      tensor.blocksize > kMaxBlocksize)
    return invalid("blocksize", tensor.blocksize, "a power of two from 32 to 4096");
  if (tensor.nested_blocksize != 0 && !is_power_of_two(tensor.nested_blocksize))
    return invalid("nested_blocksize", tensor.nested_blocksize,
                   "0 (flat) or a power of two up to 2^30");
  if (tensor.scale_rule != 0) return invalid("scale_rule", tensor.scale_rule, "0");
  return NF4_STATUS_OK;
}

// MXFP4 and NVFP4.
nf4_status validate_scale_bytes(const nf4_tensor &tensor) {
  const bool nvfp4 = tensor.format == NF4_FORMAT_NVFP4;
  if (tensor.blocksize != 32 && !(nvfp4 && tensor.blocksize == 16))
    return invalid("blocksize", tensor.blocksize, nvfp4 ? "16 or 32 in NVFP4" : "32 in MXFP4");
  if (nvfp4 ? tensor.nested_blocksize < 0 : tensor.nested_blocksize != 0)
    return invalid("nested_blocksize", tensor.nested_blocksize,
                   nvfp4 ? "0 or more rows in NVFP4" : "0 in MXFP4");
  if (tensor.scale_rule < 0 || tensor.scale_rule > (nvfp4 ? NF4_GLOBAL_DIVISOR : NF4_SCALE_CEIL))
    return invalid(
        "scale_rule", tensor.scale_rule,
        nvfp4 ? "0 (factor) or 1 (divisor) in NVFP4" : "0 (floor), 1 (even) or 2 (ceil) in MXFP4");
  if (tensor.cols % tensor.blocksize != 0)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "cols is %" PRId64 "; expected a multiple of the blocksize, %d", tensor.cols,
                tensor.blocksize);
  return NF4_STATUS_OK;
}

void set_nested(const nf4_tensor &tensor, Weight &weight) {
  weight.nested_blocksize_log2 = -1;
  if (weight.scale_bytes == ScaleBytes::kE4M3) {
    const int64_t rows = tensor.nested_blocksize == 0 ? tensor.rows : tensor.nested_blocksize;
    weight.global_blocks = std::min(rows, tensor.rows) * (tensor.cols / tensor.blocksize);
    if (weight.elements != 0) weight.nested_blocks = ceil_divide(tensor.rows, rows);
  } else if (tensor.nested_blocksize != 0) {
    weight.nested_blocksize_log2 = __builtin_ctz(static_cast<unsigned>(tensor.nested_blocksize));
    weight.nested_blocks =
        (weight.blocks + weight.nested_blocksize() - 1) >> weight.nested_blocksize_log2;
  }
}

}  // namespace

void add_weight(Operands &operands, const Weight &weight, bool written) {
  operands.add("packed", weight.packed, (weight.elements + 1) / 2, 1, written);
  const int scale = weight.scale_size();
  operands.add("absmax", weight.absmax, weight.blocks * scale, scale, written);
  if (weight.nested_blocks > 0)  // quantize reads the global scales of NVFP4
    operands.add("nested_absmax", weight.nested_absmax, weight.nested_blocks * 4, 4,
                 written && weight.nested());
  if (weight.nested()) {
    operands.add("nested_code", weight.nested_code, kScaleCodeSize * 4, 4, false);
    operands.add("nested_offset", weight.nested_offset, 4, 4, written);
  }
  if (weight.codebook != nullptr)
    operands.add("codebook", weight.codebook, kCodebookSize * 4, 4, false);
}

void copy_pointers(const nf4_tensor &tensor, Weight &weight) {
  if (weight.elements == 0) return;
  weight.packed = static_cast<uint8_t *>(tensor.packed);
  weight.absmax = tensor.absmax;
  weight.nested_absmax = tensor.nested_absmax;
  weight.nested_code = tensor.nested_code;
  weight.nested_offset = tensor.nested_offset;
  weight.codebook = tensor.codebook;
}

nf4_status validate_pointers(const nf4_tensor &tensor) {
  if (tensor.rows == 0 || tensor.cols == 0) return NF4_STATUS_OK;
  const Format &format = kFormats[format_row(tensor.format)];
  const bool scale_bytes = format.scale_bytes != ScaleBytes::kNone;
  const bool nvfp4 = tensor.format == NF4_FORMAT_NVFP4;
  const bool nested = tensor.nested_blocksize != 0 && !nvfp4;
  const struct {
    const char *name;
    const void *address;
    bool needed;
  } parts[] = {{"nested_absmax", tensor.nested_absmax, nested || nvfp4},
               {"nested_code", tensor.nested_code, nested},
               {"nested_offset", tensor.nested_offset, nested},
               {"codebook", tensor.codebook, !scale_bytes && tensor.codebook != nullptr}};
  for (const auto &part : parts) {
    if (part.needed == (part.address != nullptr)) continue;
    if (scale_bytes)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is %s, but format is %d (%s)", part.name,
                  part.needed ? "NULL" : "not NULL", tensor.format, format.name);
    if (part.needed)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is NULL, but nested_blocksize is %d", part.name,
                  tensor.nested_blocksize);
    return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is not NULL, but nested_blocksize is 0 (flat)",
                part.name);
  }
  return NF4_STATUS_OK;
}

nf4_status validate_shape(const nf4_tensor *tensor, Weight &weight) {
  if (tensor == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "the nf4_tensor is NULL");
  if (const nf4_status status =
          validate_struct_size("nf4_tensor", tensor->struct_size, sizeof(nf4_tensor)))
    return status;
  if (format_row(tensor->format) < 0) return invalid_format(tensor->format);
  const Format &format = kFormats[format_row(tensor->format)];
  if (const nf4_status status = validate_rows_cols(tensor->rows, tensor->cols)) return status;
  if (const nf4_status status = format.scale_bytes == ScaleBytes::kNone
                                    ? validate_float_scales(*tensor)
                                    : validate_scale_bytes(*tensor))
    return status;
  weight = {};
  weight.format = tensor->format;
  weight.scale_bytes = format.scale_bytes;
  weight.scale_rule = tensor->scale_rule;
  weight.rows = tensor->rows;
  weight.cols = tensor->cols;
  weight.elements = tensor->rows * tensor->cols;
  weight.blocksize_log2 = __builtin_ctz(static_cast<unsigned>(tensor->blocksize));
  weight.blocks = (weight.elements + weight.blocksize() - 1) >> weight.blocksize_log2;
  set_nested(*tensor, weight);
  return NF4_STATUS_OK;
}

template <class Tensor, class W>
nf4_status validate_dequant(const Tensor *tensor, void *out, nf4_dtype dtype,
                            DequantProblemOf<W> &problem) {
  const W &weight = problem.weight;
  if (const nf4_status status = validate_weight(tensor, problem.weight)) return status;
  if (const nf4_status status = validate_dtype("out_dtype", dtype)) return status;
  problem.out = out;
  problem.dtype = dtype;
  if (weight.elements == 0) return NF4_STATUS_OK;
  add_weight(problem.operands, weight, false);
  problem.operands.add("out", out, weight.elements * element_bytes(dtype), element_bytes(dtype),
                       true);
  return validate_operands(problem.operands);
}

template nf4_status validate_dequant(const nf4_tensor *, void *, nf4_dtype, DequantProblem &);
template nf4_status validate_dequant(const nf4_int4_tensor *, void *, nf4_dtype,
                                     Int4DequantProblem &);

nf4_status validate_quantize(const void *in, nf4_dtype dtype, const nf4_tensor *tensor,
                             void *workspace, size_t workspace_bytes, QuantizeProblem &problem) {
  if (const nf4_status status = validate_weight(tensor, problem.weight)) return status;
  if (const nf4_status status = validate_dtype("in_dtype", dtype)) return status;
  problem.in = in;
  problem.dtype = dtype;
  problem.workspace = workspace;
  if (problem.weight.elements == 0) return NF4_STATUS_OK;
  const int64_t needed = QuantizeWorkspace(problem.weight).bytes();
  if (const nf4_status status = validate_workspace(workspace_bytes, needed)) return status;
  problem.operands.add("in", in, problem.weight.elements * element_bytes(dtype),
                       element_bytes(dtype), false);
  if (needed > 0) problem.operands.add("workspace", workspace, needed, 16, true);
  add_weight(problem.operands, problem.weight, true);
  return validate_operands(problem.operands);
}

}  // namespace nf4
