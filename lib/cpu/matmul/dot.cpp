// Matmul for few rows of x: the codes go from memory to the sums.
//
// x is prepared once for a chunk of the weight's rows, in the order in which the kernels meet the
// codes, so that the codes need no sorting; the remaining work per weight is in the kernels. This
// file reads the scales of a row: 0.4 of the 1.6 ns that 64 weights at blocksize 64 take for one
// row of x on a Zen 4 (avx512bf16.cpp). docs/design/cpu.md has what was tried.
#include <algorithm>
#include <cstring>

#include "cpu/matmul/code_rows.hpp"
#include "cpu/matmul/parts.hpp"

namespace nf4::cpu {
namespace {

// The rows of the weight whose sums are kept at once, and the rows that a kernel gets at once.
constexpr int64_t kBlockN = 256;
constexpr int64_t kKernelN = 4;
// The scales of this many rows ahead are prefetched.
constexpr int64_t kRowsAhead = 8;
// The size of prepared x, which fits in the L1 cache; codes are prefetched into the L2 cache.
constexpr int64_t kPreparedBytes = 32768;
constexpr int64_t kMaxUnit = 128;
static_assert((kMaxSplitUnits + 1) * sizeof(SplitUnit) <= kPreparedBytes, "x is prepared or split");
// The columns that are split at once.
constexpr int64_t kSplitColumns = 1024;
// The least bytes of prepared x for each float of its sums: 128 numbers of bf16 have 16 sums, and
// 64 or more of fp32 have 8.
constexpr int64_t kMinUnitBytesOfSum = 16;
constexpr int64_t kMaxScales = kPreparedBytes / 2 / kMinBlocksize + kScalePadding;
static_assert(kMaxScales <= kMaxRowScales, "what is read at once");

template <class Rows, class Problem>
class DotMultiplier {
 public:
  DotMultiplier(const MatmulKernels &kernels, const Problem &problem, const Rows &rows)
      : kernels_(kernels),
        dot_(kernels.*Rows::kDot),
        problem_(problem),
        rows_(rows),
        cols_(problem.weight.cols),
        element_bytes_(element_bytes(kernels.dtype)),
        prepare_(kernels, dot_, problem),
        split_codebook_(dot_.split_x == nullptr
                            ? SplitCodebook{}
                            : split_codebook(static_cast<const uint16_t *>(rows.codebook()))),
        per_scale_(elements_per_scale(rows, cols_, kernels.unit)) {}

  void operator()(RowRange n, RowRange m) {
    const int64_t count = m.end - m.begin, groups = ceil_divide(count, kMaxDotM);
    for (int64_t i = n.begin; i < n.end; i += kBlockN)
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = count * group / groups, last = count * (group + 1) / groups;
        multiply({i, std::min(n.end, i + kBlockN)}, m.begin + first,
                 static_cast<int>(last - first));
      }
  }

 private:
  void multiply(RowRange n, int64_t first_m, int m) {
    float sums[kBlockN * kMaxDotM] = {};
    const int64_t chunk = can_split(m)
                              ? kMaxSplitUnits * kSplitUnit
                              : kPreparedBytes / element_bytes_ / m / kernels_.unit * kernels_.unit;
    for (int64_t k = 0; k < cols_; k += chunk) {
      const int64_t elements = std::min(chunk, cols_ - k);
      prepare(first_m, m, k, elements);
      for (int64_t i = n.begin; i < n.end; i += kKernelN)
        add_products({i, std::min(n.end, i + kKernelN)}, m, k, elements, sums + (i - n.begin));
    }
    for (float &sum : sums) sum *= rows_.unit();
    const Sums done{n, {first_m, first_m + m}, sums, kBlockN};
    add_adapter(kernels_, problem_, done);
    store_sums(problem_, done);
  }

  // Does nothing if that part of x was already prepared for the previous block of rows.
  void prepare(int64_t first_m, int m, int64_t k, int64_t elements) {
    if (prepared_m_ == first_m && prepared_k_ == k) return;
    prepared_m_ = first_m;
    prepared_k_ = k;
    x_stride_ = ceil_divide(elements, kernels_.unit) * kernels_.unit;
    is_split_ = can_split(m) && split(first_m, k, elements);
    if (is_split_) return;
    for (int i = 0; i < m; ++i) {
      char *const out = x_ + i * x_stride_ * element_bytes_;
      prepare_(first_m + i, k, elements, out);
      if (rows_.has_zeros()) kernels_.x_sums(out, x_stride_, x_sums_ + i * x_sums_stride());
    }
  }

  bool can_split(int m) const { return m == 1 && split_codebook_.unit != 0; }

  // Splits a part of row m of x, and tells whether integers can hold it.
  bool split(int64_t m, int64_t k, int64_t elements) {
    SplitUnit *const units = reinterpret_cast<SplitUnit *>(x_), *const end = units + kMaxSplitUnits;
    const int64_t whole = elements - elements % kSplitUnit;
    split_ = {units, end, 0, 0, {}, {}};
    split_tail_ = {end, end + 1, 0, 0, {}, {}};
    return split(m, k, whole, split_, x_sums_) &&
           split(m, k + whole, elements - whole, split_tail_,
                 x_sums_ + whole / kSplitUnit * kernels_.sum_lanes);
  }

  bool split(int64_t m, int64_t k, int64_t elements, SplitX &out, float *x_sums) {
    alignas(64) char part[kSplitColumns * sizeof(uint16_t)];
    for (int64_t i = 0; i < elements; i += kSplitColumns) {
      const int64_t count = std::min(kSplitColumns, elements - i);
      prepare_.copy(m, k + i, count, part);
      if (!dot_.split_x(part, ceil_divide(count, kSplitUnit) * kSplitUnit, split_codebook_.unit,
                        i / kSplitUnit, out, x_sums))
        return false;
    }
    return true;
  }

  int64_t x_sums_stride() const { return x_stride_ / kernels_.unit * kernels_.sum_lanes; }

  // Reads the scales of rows n, and the zeros, and returns how far those of the next row are. A
  // call would cost AVX-512 3 % of a product with one row of x.
  __attribute__((always_inline)) int64_t read_scales(RowRange n, int64_t k, int64_t elements) {
    const int64_t count = n.end - n.begin, scales = elements / per_scale_;
    if (elements == cols_ && elements % kernels_.unit == 0 &&
        rows_.has_scales_in_rows(per_scale_)) {
      rows_.prefetch(n.begin + kRowsAhead, 0, count * elements);
      rows_.read(n.begin, 0, count * elements, per_scale_, scales_, zeros_);
      return scales;
    }
    for (int64_t i = 0; i < count; ++i) {
      float *const row = scales_ + i * kMaxScales, *const zeros = zeros_ + i * kMaxScales;
      rows_.prefetch(n.begin + i + kRowsAhead, k, elements);
      rows_.read(n.begin + i, k, elements, per_scale_, row, zeros);
      // Zeros follow the last scale.
      std::fill_n(row + scales, kMaxUnit / kMinBlocksize, 0.0f);
      if (rows_.has_zeros()) std::fill_n(zeros + scales, kMaxUnit / kMinBlocksize, 0.0f);
    }
    return kMaxScales;
  }

  void add_products(RowRange n, int m, int64_t k, int64_t elements, float *sums) {
    const int count = static_cast<int>(n.end - n.begin);
    const int64_t scale_stride = read_scales(n, k, elements);
    const int64_t tail = elements % kernels_.unit;
    DotArgs args{is_split_ ? split_codebook_.entries : rows_.codebook(),
                 rows_.packed() + n.begin * rows_.row_bytes() + k / 2,
                 rows_.row_bytes(),
                 scales_,
                 scale_stride,
                 static_cast<int>(kernels_.unit / per_scale_),
                 is_split_ ? static_cast<const void *>(&split_) : x_,
                 x_stride_,
                 elements - tail,
                 count,
                 m,
                 sums,
                 kBlockN,
                 zeros_,
                 x_sums_,
                 x_sums_stride()};
    dot(args);
    if (tail > 0) add_tail(args, tail);
  }

  // Adds the rest of a row, which is less than a unit, through padded copies.
  void add_tail(DotArgs args, int64_t tail) {
    uint8_t packed[kKernelN][kMaxUnit / 2] = {};
    for (int i = 0; i < args.n; ++i)
      std::memcpy(packed[i], args.packed + i * args.row_bytes + args.elements / 2, tail / 2);
    args.packed = packed[0];
    args.row_bytes = kMaxUnit / 2;
    args.scales += args.elements / per_scale_;
    args.zeros += args.elements / per_scale_;
    args.x =
        is_split_ ? static_cast<const void *>(&split_tail_) : x_ + args.elements * element_bytes_;
    args.x_sums += args.elements / kernels_.unit * kernels_.sum_lanes;
    args.elements = kernels_.unit;
    dot(args);
  }

  void dot(const DotArgs &args) const {
    if (is_split_) return (rows_.has_zeros() ? dot_.dot_split_zeros : dot_.dot_split)(args);
    (rows_.has_zeros() ? dot_.dot_zeros : dot_.dot)(args);
  }

  const MatmulKernels &kernels_;
  const DotKernels &dot_;
  const Problem &problem_;
  const Rows rows_;
  const int64_t cols_;
  const int64_t element_bytes_;  // per element of prepared x
  const UnitsOfX<Problem> prepare_;
  const SplitCodebook split_codebook_;
  const int64_t per_scale_;  // in elements
  SplitX split_, split_tail_;
  bool is_split_ = false;  // else x is prepared
  int64_t prepared_m_ = -1;
  int64_t prepared_k_ = -1;
  int64_t x_stride_ = 0;
  float scales_[kKernelN * kMaxScales];
  float zeros_[kKernelN * kMaxScales];
  float x_sums_[kPreparedBytes / kMinUnitBytesOfSum];
  alignas(64) char x_[kPreparedBytes];
};

}  // namespace

void matmul_dot(const MatmulKernels &kernels, const MatmulProblem &problem,
                const RoundedCodebook &bf16_codebook, RowRange n, RowRange m) {
  if (problem.weight.low_nibble_first()) {
    using Multiplier = DotMultiplier<E2m1Rows, MatmulProblem>;
    return Multiplier(kernels, problem, {kernels, problem.weight, bf16_codebook})(n, m);
  }
  using Multiplier = DotMultiplier<CodebookRows, MatmulProblem>;
  Multiplier(kernels, problem, {kernels, problem.weight, bf16_codebook})(n, m);
}

void matmul_dot(const DequantKernels &dequant, const MatmulKernels &kernels,
                const Int4MatmulProblem &problem, RowRange n, RowRange m) {
  using Multiplier = DotMultiplier<IntegerRows, Int4MatmulProblem>;
  Multiplier(kernels, problem, {dequant, kernels, problem.weight})(n, m);
}

}  // namespace nf4::cpu
