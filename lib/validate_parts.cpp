#include "validate_parts.hpp"

#include <algorithm>
#include <cinttypes>

#include "status.hpp"
#include "validate.hpp"

namespace nf4 {

nf4_status invalid(const char *name, int64_t value, const char *expected) {
  return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is %" PRId64 "; expected %s", name, value, expected);
}

nf4_status validate_struct_size(const char *type, size_t given, size_t known) {
  if (given == known) return NF4_STATUS_OK;
  return fail(NF4_STATUS_INVALID_ARGUMENT, "%s.struct_size is %zu; this library knows %zu", type,
              given, known);
}

nf4_status validate_dtype(const char *name, nf4_dtype dtype) {
  if (dtype == NF4_DTYPE_FP32 || dtype == NF4_DTYPE_FP16 || dtype == NF4_DTYPE_BF16)
    return NF4_STATUS_OK;
  return invalid(name, dtype, "1 (fp32), 2 (fp16) or 3 (bf16)");
}

nf4_status validate_rows_cols(int64_t rows, int64_t cols) {
  if (rows < 0) return invalid("rows", rows, "0 or more");
  if (cols < 0) return invalid("cols", cols, "0 or more");
  if (cols != 0 && rows > kMaxElements / cols)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "rows * cols is %" PRId64 " * %" PRId64 "; expected at most 2^60", rows, cols);
  return NF4_STATUS_OK;
}

nf4_status validate_stride(const Matrix &matrix) {
  if (matrix.stride < matrix.columns)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is %" PRId64 "; expected at least %" PRId64,
                matrix.name, matrix.stride, matrix.columns);
  if (matrix.rows != 0 && matrix.stride > kMaxElements / matrix.rows)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "%s * %s is %" PRId64 " * %" PRId64 "; expected at most 2^60", matrix.rows_name,
                matrix.name, matrix.rows, matrix.stride);
  return NF4_STATUS_OK;
}

Extent extent(const Operand &operand) {
  const auto begin = reinterpret_cast<uintptr_t>(operand.address);
  return {begin, begin + std::min(static_cast<uintptr_t>(operand.bytes), UINTPTR_MAX - begin)};
}

bool overlap(const Operand &a, const Operand &b) {
  const Extent of_a = extent(a), of_b = extent(b);
  return of_a.begin < of_b.end && of_b.begin < of_a.end;
}

nf4_status validate_operands(const Operands &operands) {
  for (const Operand &operand : operands) {
    if (operand.address == nullptr)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is NULL", operand.name);
    if (reinterpret_cast<uintptr_t>(operand.address) % operand.alignment != 0)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is %p; expected a multiple of %d", operand.name,
                  operand.address, operand.alignment);
  }
  for (const Operand &a : operands)
    for (const Operand *b = &a + 1; b != operands.end(); ++b)
      if ((a.written || b->written) && overlap(a, *b))
        return fail(NF4_STATUS_INVALID_ARGUMENT, "%s overlaps %s", a.name, b->name);
  return NF4_STATUS_OK;
}

nf4_status validate_workspace(size_t given, int64_t needed) {
  if (given >= static_cast<size_t>(needed)) return NF4_STATUS_OK;
  return fail(NF4_STATUS_INVALID_ARGUMENT, "workspace_bytes is %zu; expected at least %" PRId64,
              given, needed);
}

nf4_status validate_threads(int32_t threads) {
  return threads >= 0 ? NF4_STATUS_OK : invalid("threads", threads, "0 or more");
}

}  // namespace nf4
