// The gradient, dx = dy W: rows of the weight are dequantized into a panel, a strip of columns at a
// time, and added up with the elements of dy as factors. The sums of many rows of dy stay in the
// caches. The matrices of an adapter are read likewise: dy B, then scale * (dy B) A. Their
// gradients, scale q^T x and scale dy^T p, are added up with the elements of q or p as factors.
//
// A sum is taken over the rows of a panel, then over panels: its order depends only on the problem.
// docs/design/cpu.md has times.
#include <algorithm>
#include <cstring>

#include "cpu/dequant/range.hpp"
#include "cpu/matmul/matmul.hpp"
#include "cpu/matmul/parts.hpp"

namespace nf4::cpu {

// Stores the sums of a gradient of an adapter's matrix; their rows are the ranks. It stores a line
// of sums at a time, as the ranks of a column may lie side by side in memory.
template <>
void store_sums(const LoraGradPart &part, const Sums &sums) {
  constexpr int64_t kLine = 16;
  with_dtype(part.problem.grad_dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t first = sums.n.begin; first < sums.n.end; first += kLine)
      for (int64_t r = sums.m.begin; r < sums.m.end; ++r) {
        const int64_t count = std::min(kLine, sums.n.end - first);
        const float *values = sums.values + (r - sums.m.begin) * sums.stride + first - sums.n.begin;
        T *out = static_cast<T *>(part.of.out) + part.at(r, first);
        for (int64_t i = 0; i < count; ++i)
          out[i * part.column_step] = from_float<T>(part.problem.scale * values[i]);
      }
  });
}

namespace {

// The source of a panel's rows: columns k of row n.

class WeightRows {
 public:
  WeightRows(const DequantKernels &kernels, const MatmulProblem &problem, nf4_dtype dtype)
      : weight_(problem.weight),
        first_(problem.group->first_row),
        dequant_(kernels, problem.weight, dtype) {}

  int64_t count() const { return weight_.rows; }
  void operator()(int64_t n, RowRange k, char *out) {
    dequant_((first_ + n) * weight_.cols + k.begin, k.end - k.begin, out);
  }
  // Prefetches codes that are read soon.
  void prefetch(int64_t n, RowRange k) const {
    const uint8_t *packed = weight_.packed + ((first_ + n) * weight_.cols + k.begin) / 2;
    for (int64_t i = 0; i < (k.end - k.begin) / 2; i += 64) __builtin_prefetch(packed + i, 0, 2);
  }

 private:
  const Weight &weight_;
  const int64_t first_;
  RangeDequantizer dequant_;
};

class DenseRows {
 public:
  DenseRows(const MatmulKernels &kernels, const DenseMatrix &matrix)
      : kernels_(kernels), matrix_(matrix) {}

  int64_t count() const { return matrix_.rows; }
  void operator()(int64_t n, RowRange k, char *out) const {
    matrix_.read(kernels_, n, k.begin, k.end - k.begin, out);
  }
  void prefetch(int64_t, RowRange) const {}

 private:
  const MatmulKernels &kernels_;
  const DenseMatrix &matrix_;
};

// The sums of rows of dx, for a strip of its columns.
class OuterSums {
 public:
  static constexpr int64_t kMaxStrip = 1024;
  static constexpr int64_t kSums = 32768;
  // A wider strip is faster to dequantize, but less so than dequantizing once for all rows.
  static int64_t strip_for(int64_t m) {
    int64_t strip = kMaxStrip;
    while (strip > kOuterColumns && m * strip > kSums) strip /= 2;
    return strip;
  }

  OuterSums(const MatmulKernels &kernels, int64_t strip)
      : kernels_(kernels),
        strip_(strip),
        element_bytes_(element_bytes(kernels.dtype)),
        panel_rows_(std::min(kMaxPanelRows, kPanelBytes / (strip * element_bytes_))) {
    std::memset(panel_, 0, sizeof panel_);
  }

  // Calls work(m, k) for parts of the rows and columns of the output, and stores the sums that it
  // adds there.
  template <class Problem, class Work>
  void for_parts(const Problem &problem, int64_t rows, RowRange columns, const Work &work) {
    const int64_t groups = ceil_divide(rows, kSums / strip_);
    for (int64_t i = columns.begin; i < columns.end; i += strip_)
      for (int64_t group = 0; group < groups; ++group) {
        const RowRange m{rows * group / groups, rows * (group + 1) / groups};
        const RowRange k{i, std::min(columns.end, i + strip_)};
        std::fill_n(sums_, (m.end - m.begin) * strip_, 0.0f);
        work(m, k);
        store_sums(problem, {k, m, sums_, strip_});
      }
  }

  // Adds factors times rows. factors: [m][rows.count()].
  template <class Rows>
  void add(Rows &rows, const DenseMatrix &factors, RowRange m, RowRange k) {
    for (int64_t n = 0; n < rows.count(); n += panel_rows_) {
      const RowRange panel{n, std::min(rows.count(), n + panel_rows_)};
      load(rows, panel, k);
      for (int64_t i = m.begin; i < m.end; i += kOuterM)
        add_panel(factors, panel, {i, std::min(m.end, i + kOuterM)}, k,
                  sums_ + (i - m.begin) * strip_);
    }
  }

 private:
  static constexpr int64_t kPanelBytes = 32768;
  static constexpr int64_t kMaxPanelRows = 64;

  template <class Rows>
  void load(Rows &rows, RowRange panel, RowRange k) {
    const int64_t row_bytes = strip_ * element_bytes_;
    char *out = panel_;
    for (int64_t n = panel.begin; n < panel.end; ++n) {
      if (n + panel_rows_ < rows.count()) rows.prefetch(n + panel_rows_, k);
      if (kernels_.pair_rows == nullptr) {
        rows(n, k, out);
        out += row_bytes;
        continue;
      }
      const bool second = (n - panel.begin) % 2 == 1;
      rows(n, k, pair_ + second * row_bytes);
      const bool alone = !second && n + 1 == panel.end;
      if (alone) std::memset(pair_ + row_bytes, 0, row_bytes);
      if (!second && !alone) continue;
      kernels_.pair_rows(pair_, pair_ + row_bytes, to_steps(k.end - k.begin), out);
      out += 2 * row_bytes;
    }
  }

  void add_panel(const DenseMatrix &factors, RowRange panel, RowRange m, RowRange k, float *sums) {
    const int64_t pair = kernels_.pair_rows == nullptr ? 1 : 2;
    const int64_t rows = ceil_divide(panel.end - panel.begin, pair) * pair;
    const bool in_place = factors.dtype == kernels_.dtype && factors.scale == 1 &&
                          factors.step == 1 && factors.order == nullptr &&
                          rows == panel.end - panel.begin;
    if (!in_place)
      for (int64_t i = m.begin; i < m.end; ++i)
        factors.read(kernels_, i, panel.begin, panel.end - panel.begin,
                     factors_ + (i - m.begin) * kMaxPanelRows * element_bytes_);
    kernels_.outer({panel_, pair * strip_,
                    in_place ? factors.address(m.begin, panel.begin) : factors_,
                    in_place ? factors.stride : kMaxPanelRows, static_cast<int>(rows),
                    static_cast<int>(ceil_divide(k.end - k.begin, kOuterColumns) * kOuterColumns),
                    static_cast<int>(m.end - m.begin), sums, strip_});
  }

  const MatmulKernels &kernels_;
  const int64_t strip_;
  const int64_t element_bytes_;
  const int64_t panel_rows_;
  alignas(64) char panel_[kPanelBytes];
  alignas(64) char pair_[2 * kMaxStrip * sizeof(uint16_t)];
  alignas(64) char factors_[kOuterM * kMaxPanelRows * sizeof(float)];
  alignas(64) float sums_[kSums];
};

// x as factors: its rows, with a column for each row of the weight.
template <class Problem>
DenseMatrix factors_of(const Problem &problem, int64_t columns) {
  return {problem.m,
          columns,
          problem.dtype,
          problem.x,
          problem.x_stride,
          1,
          problem.group->x_index == nullptr ? nullptr : problem.group};
}

}  // namespace

void matmul_grad_vector(const MatmulSet &set, const MatmulProblem &problem, RowRange columns) {
  const MatmulKernels &kernels = kernels_for(set, problem.dtype);
  const Weight &weight = problem.weight;
  const Lora &lora = problem.lora;
  const DenseMatrix dy = factors_of(problem, weight.rows);
  const DenseMatrix a{lora.rank, weight.cols, lora.dtype, lora.a, lora.a_stride};
  const DenseMatrix p{problem.m, lora.rank, problem.dtype, lora.product, lora.rank, lora.scale};
  WeightRows rows(set.dequant, problem, kernels.dtype);
  DenseRows adapter(kernels, a);
  OuterSums sums(kernels, OuterSums::strip_for(problem.m));
  sums.for_parts(problem, problem.m, columns, [&](RowRange m, RowRange k) {
    sums.add(rows, dy, m, k);
    if (lora.rank > 0) sums.add(adapter, p, m, k);
  });
}

void dense_outer(const MatmulKernels &kernels, const DenseProblem &problem) {
  const DenseMatrix factors = factors_of(problem, problem.weight.rows);
  DenseRows rows(kernels, problem.weight);
  OuterSums sums(kernels, kOuterColumns);
  sums.for_parts(problem, problem.m, {0, problem.weight.cols},
                 [&](RowRange m, RowRange k) { sums.add(rows, factors, m, k); });
}

// Few ranks share a number that is read from x, so pairs of rows for bf16 kernels would cost as
// much as they save.
void lora_grad_vector(const MatmulKernels &kernels, const LoraGradPart &part, RowRange columns) {
  // This allows more rows in a panel, and fewer sums in a pass, than the widest strip.
  constexpr int64_t kStrip = 256;
  static_assert(kStrip * kMaxLoraRank <= OuterSums::kSums);
  const LoraGradProblem &problem = part.problem;
  const LoraGrad &of = part.of;
  const int64_t rank = problem.rank;
  const DenseMatrix left{rank, problem.m, problem.dtype, of.left, 1, 1, nullptr, rank};
  const DenseMatrix right{problem.m, of.columns, problem.dtype, of.right, of.right_stride};
  DenseRows rows(kernels, right);
  OuterSums sums(kernels, kStrip);
  sums.for_parts(part, rank, columns, [&](RowRange m, RowRange k) { sums.add(rows, left, m, k); });
}

}  // namespace nf4::cpu
