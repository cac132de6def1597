// Dequantizes integer weights in blocks of rows and columns whose codes fit in the caches.
#include "cpu/weight/int4.hpp"

#include <algorithm>

#include "cpu/dequant/dequant.hpp"
#include "cpu/dequant/int4_rows.hpp"
#include "cpu/dequant/output.hpp"
#include "cpu/dtypes.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kCodeBytes = 57344;  // loaded together
constexpr int64_t kTableBytes = 16384;

class Int4Dequantizer {
 public:
  Int4Dequantizer(const DequantKernels &kernels, const Int4DequantProblem &problem)
      : weight_(problem.weight),
        dtype_(problem.dtype),
        out_(static_cast<char *>(problem.out)),
        element_bytes_(element_bytes(problem.dtype)),
        rows_(kernels, problem.weight, problem.dtype),
        output_(kernels, problem.out, problem.weight.elements * element_bytes_) {}

  void operator()(RowRange n) {
    const int64_t row_bytes = weight_.cols * element_bytes_;
    output_.begin(n.begin * row_bytes, n.end * row_bytes);
    // Rows of codes are read one by one. Rows of words are read many at a time, in parts of at
    // least a cache line.
    const int64_t rows = weight_.layout == NF4_INT4_COMPRESSED_TENSORS ? 1 : rows_.max_rows();
    const int64_t columns =
        std::min(rows_.max_columns(rows), DequantOutput::kStagedBytes / element_bytes_);
    for (int64_t i = n.begin; i < n.end; i += rows)
      for (int64_t k = 0; k < weight_.cols; k += columns) {
        const RowRange block{i, std::min(n.end, i + rows)};
        const int64_t count = std::min(columns, weight_.cols - k);
        rows_.load(block, k, count);
        if (k + count < weight_.cols)
          rows_.expect(block, k + count, std::min(columns, weight_.cols - k - count));
        else if (block.end < n.end)
          rows_.expect({block.end, std::min(n.end, block.end + rows)}, 0,
                       std::min(columns, weight_.cols));
        dequant(block, k, count);
      }
    output_.end();
  }

 private:
  void dequant(RowRange n, int64_t k, int64_t count) {
    const bool whole = count % kKernelStep == 0 && weight_.permutation == nullptr;
    for (int64_t i = n.begin; i < n.end; ++i) {
      const int64_t offset = (i * weight_.cols + k) * element_bytes_;
      char *const made = whole ? output_.place(offset) : output_.stage();
      rows_(i, k, count, made);
      if (weight_.permutation != nullptr)
        scatter(made, i, k, count);
      else
        output_.store(made, offset, count * element_bytes_);
    }
  }

  void scatter(const char *made, int64_t n, int64_t k, int64_t count) const {
    with_dtype(dtype_, [&](auto type) {
      const auto *from = reinterpret_cast<const decltype(type) *>(made);
      auto *row = reinterpret_cast<decltype(type) *>(out_) + n * weight_.cols;
      for (int64_t i = 0; i < count; ++i) row[weight_.permutation[k + i]] = from[i];
    });
  }

  const Int4Weight &weight_;
  const nf4_dtype dtype_;
  char *const out_;
  const int64_t element_bytes_;
  Int4RowsOf<kCodeBytes, kTableBytes> rows_;
  DequantOutput output_;
};

}  // namespace

void int4_dequant_vector(const DequantKernels &kernels, const Int4DequantProblem &problem,
                         RowRange n) {
  Int4Dequantizer(kernels, problem)(n);
}

}  // namespace nf4::cpu
