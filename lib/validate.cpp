#include "validate.hpp"

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

}  // namespace

void add_weight(Operands &operands, const Weight &weight, bool written) {
  operands.add("packed", weight.packed, (weight.elements + 1) / 2, 1, written);
  if (weight.nested()) {
    operands.add("absmax", weight.absmax, weight.blocks, 1, written);
    operands.add("nested_absmax", weight.nested_absmax, weight.nested_blocks * 4, 4, written);
    operands.add("nested_code", weight.nested_code, kScaleCodeSize * 4, 4, false);
    operands.add("nested_offset", weight.nested_offset, 4, 4, written);
  } else {
    operands.add("absmax", weight.absmax, weight.blocks * 4, 4, written);
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
  const struct {
    const char *name;
    const void *address;
  } parts[] = {{"nested_absmax", tensor.nested_absmax},
               {"nested_code", tensor.nested_code},
               {"nested_offset", tensor.nested_offset}};
  for (const auto &part : parts) {
    if (tensor.nested_blocksize != 0 && part.address == nullptr)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is NULL, but nested_blocksize is %d", part.name,
                  tensor.nested_blocksize);
    if (tensor.nested_blocksize == 0 && part.address != nullptr)
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
  if (!is_power_of_two(tensor->blocksize) || tensor->blocksize < kMinBlocksize ||
      tensor->blocksize > kMaxBlocksize)
    return invalid("blocksize", tensor->blocksize, "a power of two from 32 to 4096");
  if (tensor->nested_blocksize != 0 && !is_power_of_two(tensor->nested_blocksize))
    return invalid("nested_blocksize", tensor->nested_blocksize,
                   "0 (flat) or a power of two up to 2^30");
  if (tensor->reserved != 0) return invalid("reserved", tensor->reserved, "0");
  if (const nf4_status status = validate_rows_cols(tensor->rows, tensor->cols)) return status;
  weight = {};
  weight.format = tensor->format;
  weight.rows = tensor->rows;
  weight.cols = tensor->cols;
  weight.elements = tensor->rows * tensor->cols;
  weight.blocksize_log2 = __builtin_ctz(static_cast<unsigned>(tensor->blocksize));
  weight.blocks = (weight.elements + weight.blocksize() - 1) >> weight.blocksize_log2;
  weight.nested_blocksize_log2 = -1;
  if (tensor->nested_blocksize != 0) {
    weight.nested_blocksize_log2 = __builtin_ctz(static_cast<unsigned>(tensor->nested_blocksize));
    weight.nested_blocks =
        (weight.blocks + weight.nested_blocksize() - 1) >> weight.nested_blocksize_log2;
  }
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
