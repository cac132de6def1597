// Checks the arguments of integer weights.
#include <algorithm>
#include <cinttypes>

#include "core/int4.hpp"
#include "status.hpp"
#include "validate.hpp"
#include "validate_parts.hpp"

namespace nf4 {
namespace {

int64_t packed_words(const Int4Weight &weight) {
  return int4_packed_words(weight.layout, weight.rows, weight.cols);
}

int64_t zero_words(const Int4Weight &weight) { return int4_zero_words(weight.rows, weight.groups); }

nf4_status validate_group_size(const nf4_int4_tensor &tensor) {
  const int32_t size = tensor.group_size;
  if (size == -1) return NF4_STATUS_OK;
  if (size <= 0 || size % kInt4PerWord != 0)
    return invalid("group_size", size, "a multiple of 8, or -1 (one group of all columns)");
  if (tensor.cols % size != 0)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "group_size is %d; expected a divisor of cols, %" PRId64 ", or -1", size,
                tensor.cols);
  return NF4_STATUS_OK;
}

nf4_status validate_zero_offset(const nf4_int4_tensor &tensor) {
  if (tensor.zero_offset == 0) return NF4_STATUS_OK;
  if (tensor.zero_offset != 1) return invalid("zero_offset", tensor.zero_offset, "0 or 1");
  if (tensor.layout == NF4_INT4_GPTQ) return NF4_STATUS_OK;
  return invalid("zero_offset", 1, "0 in this layout (1 is for GPTQ v1)");
}

nf4_status validate_words(const nf4_int4_tensor &tensor) {
  if (tensor.layout == NF4_INT4_GPTQ && tensor.cols % kInt4PerWord != 0)
    return invalid("cols", tensor.cols, "a multiple of 8 in the GPTQ layout");
  if (tensor.layout == NF4_INT4_AWQ && tensor.rows % kInt4PerWord != 0)
    return invalid("rows", tensor.rows, "a multiple of 8 in the AWQ layout");
  return NF4_STATUS_OK;
}

bool same_fields(const nf4_int4_tensor &a, const nf4_int4_tensor &b) {
  return a.layout == b.layout && a.scales_dtype == b.scales_dtype && a.group_size == b.group_size &&
         a.zero_offset == b.zero_offset && a.rows == b.rows && a.cols == b.cols &&
         (a.zeros == nullptr) == (b.zeros == nullptr);
}

nf4_status validate_indices(const char *name, const int32_t *values, int64_t count, int64_t end) {
  if (values == nullptr) return NF4_STATUS_OK;
  const auto limit = static_cast<uint32_t>(std::min(end, int64_t{1} << 31));
  uint32_t wrong = 0;  // a loop without an exit, which compilers vectorise
  for (int64_t i = 0; i < count; ++i) wrong |= static_cast<uint32_t>(values[i]) >= limit;
  for (int64_t i = 0; wrong != 0 && i < count; ++i)
    if (static_cast<uint32_t>(values[i]) >= limit)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s[%" PRId64 "] is %d; expected 0 to %" PRId64,
                  name, i, values[i], end - 1);
  return NF4_STATUS_OK;
}

}  // namespace

nf4_status validate_columns(const Int4Weight &weight, int64_t experts) {
  if (weight.elements == 0) return NF4_STATUS_OK;
  const int64_t count = experts * weight.cols;
  if (const nf4_status status = validate_indices("g_idx", weight.g_idx, count, weight.groups))
    return status;
  return validate_indices("permutation", weight.permutation, count, weight.cols);
}

void add_weight(Operands &operands, const Int4Weight &weight, bool written) {
  operands.add("packed", weight.packed, packed_words(weight) * 4, 4, written);
  operands.add("scales", weight.scales, weight.rows * weight.groups * 2, 2, written);
  if (weight.zeros != nullptr)
    operands.add("zeros", weight.zeros, zero_words(weight) * 4, 4, written);
  if (weight.g_idx != nullptr) operands.add("g_idx", weight.g_idx, weight.cols * 4, 4, false);
  if (weight.permutation != nullptr)
    operands.add("permutation", weight.permutation, weight.cols * 4, 4, false);
}

void copy_pointers(const nf4_int4_tensor &tensor, Int4Weight &weight) {
  if (weight.elements == 0) return;
  weight.packed = static_cast<uint32_t *>(tensor.packed);
  weight.scales = tensor.scales;
  weight.zeros = static_cast<uint32_t *>(tensor.zeros);
}

nf4_status validate_pointers(const nf4_int4_tensor &tensor) {
  const bool empty = tensor.rows == 0 || tensor.cols == 0;
  if (!empty && tensor.zeros == nullptr && tensor.zero_offset != 0)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "zero_offset is %d, but zeros is NULL",
                tensor.zero_offset);
  return NF4_STATUS_OK;
}

nf4_status validate_shape(const nf4_int4_tensor *tensor, Int4Weight &weight) {
  if (tensor == nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "the nf4_int4_tensor is NULL");
  if (const nf4_status status =
          validate_struct_size("nf4_int4_tensor", tensor->struct_size, sizeof(nf4_int4_tensor)))
    return status;
  if (tensor->layout < NF4_INT4_GPTQ || tensor->layout > NF4_INT4_COMPRESSED_TENSORS)
    return invalid("layout", tensor->layout, "1 (GPTQ), 2 (AWQ) or 3 (compressed-tensors)");
  if (tensor->scales_dtype != NF4_DTYPE_FP16 && tensor->scales_dtype != NF4_DTYPE_BF16)
    return invalid("scales_dtype", tensor->scales_dtype, "2 (fp16) or 3 (bf16)");
  if (const nf4_status status = validate_rows_cols(tensor->rows, tensor->cols)) return status;
  if (const nf4_status status = validate_group_size(*tensor)) return status;
  if (const nf4_status status = validate_zero_offset(*tensor)) return status;
  if (const nf4_status status = validate_words(*tensor)) return status;
  weight = {};
  weight.layout = tensor->layout;
  weight.scales_dtype = tensor->scales_dtype;
  weight.zero_offset = static_cast<uint32_t>(tensor->zero_offset);
  weight.rows = tensor->rows;
  weight.cols = tensor->cols;
  weight.elements = tensor->rows * tensor->cols;
  weight.group_size = tensor->group_size == -1 ? tensor->cols : tensor->group_size;
  weight.g_idx = tensor->g_idx;
  weight.permutation = tensor->permutation;
  weight.groups = weight.cols == 0 ? 0 : weight.cols / weight.group_size;
  return NF4_STATUS_OK;
}

Int4Bytes bytes_of(const Int4Weight &weight) {
  return {packed_words(weight) * 4, weight.rows * weight.groups * 2, zero_words(weight) * 4};
}

nf4_status validate_quantize(const void *in, nf4_dtype dtype, const nf4_int4_tensor *tensor,
                             int32_t symmetric, Int4QuantizeProblem &problem) {
  if (const nf4_status status = validate_weight(tensor, problem.weight)) return status;
  if (const nf4_status status = validate_dtype("in_dtype", dtype)) return status;
  if (symmetric != 0 && symmetric != 1) return invalid("symmetric", symmetric, "0 or 1");
  problem.in = in;
  problem.dtype = dtype;
  problem.symmetric = symmetric == 1;
  const Int4Weight &weight = problem.weight;
  if (weight.elements == 0) return NF4_STATUS_OK;
  if (symmetric == 0 && weight.zeros == nullptr)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "zeros is NULL, but symmetric is 0");
  if (weight.g_idx != nullptr || weight.permutation != nullptr)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is not NULL; expected NULL in quantize",
                weight.g_idx != nullptr ? "g_idx" : "permutation");
  problem.operands.add("in", in, weight.elements * element_bytes(dtype), element_bytes(dtype),
                       false);
  add_weight(problem.operands, weight, true);
  return validate_operands(problem.operands);
}

nf4_status validate_reorder(const nf4_int4_tensor *from, const nf4_int4_tensor *to,
                            Int4ReorderProblem &problem) {
  Int4Weight reordered;
  if (const nf4_status status = validate_weight(from, problem.from)) return status;
  if (const nf4_status status = validate_weight(to, reordered)) return status;
  if (!same_fields(*from, *to))
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "`to` differs from `from` in another field than packed, g_idx and permutation");
  if (problem.from.cols > INT32_MAX)
    return invalid("cols", problem.from.cols, "at most 2^31 - 1, for a permutation of int32");
  if (problem.from.elements == 0) return NF4_STATUS_OK;
  if (from->g_idx == nullptr || from->permutation != nullptr)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "expected `from` with g_idx and without permutation");
  if (to->g_idx != nullptr) return fail(NF4_STATUS_INVALID_ARGUMENT, "g_idx of `to` is not NULL");
  problem.packed = reordered.packed;
  problem.permutation = const_cast<int32_t *>(reordered.permutation);
  add_weight(problem.operands, problem.from, false);
  problem.operands.add("packed of `to`", problem.packed, packed_words(reordered) * 4, 4, true);
  problem.operands.add("permutation of `to`", problem.permutation, reordered.cols * 4, 4, true);
  return validate_operands(problem.operands);
}

}  // namespace nf4
