// Shared by the multipliers of integer weights by columns: x in the kernels' dtype and in the order
// of words, and the sums of a block of rows of the weight.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/matmul/parts.hpp"

namespace nf4::cpu {

// kMaxM is the number of rows of x for which words are read once. kSums is the number of sums that
// are kept at once.
template <int64_t kMaxM, int64_t kSums>
class ColumnsBase {
 protected:
  // A multiple of whole vectors of AWQ words.
  static constexpr int64_t kVectorRows = 128;
  static constexpr int64_t kMaxBlockN = 2048;
  static constexpr int64_t kPreparedBytes = 32768;

  ColumnsBase(const MatmulKernels &kernels, const Int4MatmulProblem &problem)
      : kernels_(kernels),
        problem_(problem),
        weight_(problem.weight),
        groups_m_(ceil_divide(problem.m, kMaxM)),
        max_m_(ceil_divide(problem.m, groups_m_)),
        block_n_(std::min(kMaxBlockN, kSums / max_m_ / kVectorRows * kVectorRows)),
        x_bytes_(kPreparedBytes / max_m_ / (kKernelStep * 4) * (kKernelStep * 4)),
        x_stride_(x_bytes_ / element_bytes(kernels.dtype)),
        convert_{kernels.convert[problem.dtype - 1], kKernelStep, element_bytes(problem.dtype),
                 element_bytes(kernels.dtype)},
        pair_{kernels.pair_columns, kKernelStep, element_bytes(problem.dtype),
              element_bytes(kernels.dtype)} {}

  // Calls add(rows) for blocks of rows of the weight and groups of rows of x; the latter are in m_.
  template <class Add, class Store>
  void for_blocks(RowRange n, const Add &add, const Store &store) {
    for (int64_t i = n.begin; i < n.end; i += block_n_)
      for (int64_t group = 0; group < groups_m_; ++group) {
        const RowRange rows{i, std::min(n.end, i + block_n_)};
        m_ = {problem_.m * group / groups_m_, problem_.m * (group + 1) / groups_m_};
        std::fill_n(sums_, (m_.end - m_.begin) * block_n_, 0.0f);
        add(rows);
        store(rows);
        store_sums(problem_, {rows, m_, sums_, block_n_});
      }
  }

  // Row i of m_ as prepared, from prepared column `at` on.
  char *prepared(int64_t i, int64_t at = 0) {
    return x_ + i * x_bytes_ + at * element_bytes(kernels_.dtype);
  }

  // Converts elements of x to `out`, in whole steps, in the order of GPTQ words or of columns.
  void convert(const char *x, int64_t elements, char *out, bool for_gptq) const {
    if (for_gptq && pair_.convert != nullptr)
      pair_(x, elements, out);
    else if (convert_.convert != nullptr)
      convert_(x, elements, out);
    else
      std::memcpy(out, x, elements * element_bytes(kernels_.dtype));
  }

  // The arguments for some groups of columns, from prepared column `at` on.
  ColumnsArgs args_of(int64_t at, int64_t cols, int64_t groups) {
    ColumnsArgs args{};
    args.codebook = int4_codebook(kernels_.dtype);
    args.cols = cols;
    args.groups = static_cast<int>(groups);
    args.x = prepared(0, at);
    args.x_stride = x_stride_;
    args.m = static_cast<int>(m_.end - m_.begin);
    args.sums = sums_;
    args.sums_stride = block_n_;
    return args;
  }

  const MatmulKernels &kernels_;
  const Int4MatmulProblem &problem_;
  const Int4Weight &weight_;
  const int64_t groups_m_;
  const int64_t max_m_;
  const int64_t block_n_;
  const int64_t x_bytes_;
  const int64_t x_stride_;
  const PaddedConversion convert_;
  const PaddedConversion pair_;  // converts x in the kernels' dtype
  RowRange m_{};
  alignas(64) float sums_[kSums];
  alignas(64) char x_[kPreparedBytes];
};

}  // namespace nf4::cpu
