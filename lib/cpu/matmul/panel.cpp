// Matmul for many rows of x: a panel of rows of the weight is dequantized into the caches and
// multiplied with all rows of x.
//
// On a Zen 4, 64 weights take 3.3 ns to dequantize, of which 1.2 are for the scales, and 0.58 ns
// for each row of x in bf16 (0.54 at one vdpbf16ps a cycle). docs/design/cpu.md has what was tried.
#include <algorithm>
#include <cstring>

#include "cpu/dequant/int4_rows.hpp"
#include "cpu/dequant/range.hpp"
#include "cpu/matmul/parts.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kMaxPanelN = 16;
// The bytes of converted x.
constexpr int64_t kConvertedBytes = 4096;
constexpr int64_t kMaxTileM = 6;

// The source of a panel's rows. It knows how many rows of the weight are best read together
// (kBlockN at most) and how many of their columns, the bytes of a panel, and the rows of x that a
// panel serves.

class Nf4Rows {
 public:
  static constexpr int64_t kBlockN = kMaxPanelN;
  static constexpr int64_t kPanelM = 96;
  static constexpr int64_t kPanelBytes = 65536;
  static constexpr int64_t kMaxColumns = RangeDequantizer::kMaxElements;

  Nf4Rows(const DequantKernels &dequant, const MatmulKernels &kernels, const Weight &weight,
          int64_t panel_n)
      : weight_(weight), panel_n_(panel_n), dequant_(dequant, weight, kernels.dtype) {}

  int64_t block_n() const { return panel_n_; }
  int64_t max_columns() const { return kMaxColumns; }
  void load(RowRange, RowRange, int64_t, int64_t) {}
  void operator()(int64_t n, int64_t k, int64_t elements, char *out) {
    prefetch((n + panel_n_) * weight_.cols + k, elements);
    dequant_(n * weight_.cols + k, elements, out);
  }

 private:
  // Prefetches the codes of the next panel.
  void prefetch(int64_t first, int64_t elements) const {
    const uint8_t *packed = weight_.packed + first / 2;
    for (int64_t i = 0; i < elements / 2; i += 64) __builtin_prefetch(packed + i, 0, 2);
  }

  const Weight &weight_;
  const int64_t panel_n_;
  RangeDequantizer dequant_;
};

// Integer codes are in words of 128 rows, which takes some of the room of the sums and the panel.
class IntegerRows {
 public:
  static constexpr int64_t kBlockN = 128;
  static constexpr int64_t kPanelM = 64;
  static constexpr int64_t kPanelBytes = 32768;
  static constexpr int64_t kMaxColumns = 2048;
  static constexpr int64_t kCodeBytes = 32768;
  static constexpr int64_t kTableBytes = 4096;

  IntegerRows(const DequantKernels &dequant, const MatmulKernels &kernels, const Int4Weight &weight,
              int64_t panel_n)
      : weight_(weight), panel_n_(panel_n), rows_(dequant, weight, kernels.dtype) {}

  // Whole vectors of AWQ words, or a cache line of GPTQ words.
  int64_t block_n() const {
    if (weight_.layout == NF4_INT4_AWQ) return kBlockN;
    return weight_.layout == NF4_INT4_GPTQ ? kMaxPanelN : panel_n_;
  }
  int64_t max_columns() const { return std::min(kMaxColumns, rows_.max_columns(block_n())); }
  // The next rows are the rows of `all` after n.
  void load(RowRange n, RowRange all, int64_t k, int64_t elements) {
    rows_.load(n, k, elements);
    if (k + elements < weight_.cols)
      rows_.expect(n, k + elements, std::min(elements, weight_.cols - k - elements));
    else if (n.end < all.end)
      rows_.expect({n.end, std::min(all.end, n.end + block_n())}, 0, elements);
  }
  void operator()(int64_t n, int64_t k, int64_t elements, char *out) { rows_(n, k, elements, out); }

 private:
  const Int4Weight &weight_;
  const int64_t panel_n_;
  Int4RowsOf<kCodeBytes, kTableBytes> rows_;
};

// The rows of an adapter's matrix.
class DenseRows {
 public:
  static constexpr int64_t kBlockN = kMaxPanelN;
  static constexpr int64_t kPanelM = 96;
  static constexpr int64_t kPanelBytes = 65536;
  static constexpr int64_t kMaxColumns = 4096;

  DenseRows(const DequantKernels &, const MatmulKernels &kernels, const DenseMatrix &matrix,
            int64_t panel_n)
      : kernels_(kernels), matrix_(matrix), panel_n_(panel_n) {}

  int64_t block_n() const { return panel_n_; }
  int64_t max_columns() const { return kMaxColumns; }
  void load(RowRange, RowRange, int64_t, int64_t) {}
  void operator()(int64_t n, int64_t k, int64_t elements, char *out) {
    matrix_.read(kernels_, n, k, elements, out);
  }

 private:
  const MatmulKernels &kernels_;
  const DenseMatrix &matrix_;
  const int64_t panel_n_;
};

template <class Rows, class Problem>
class PanelMultiplier {
 public:
  PanelMultiplier(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const Problem &problem)
      : kernels_(kernels),
        problem_(problem),
        weight_(problem.weight),
        element_bytes_(element_bytes(kernels.dtype)),
        row_bytes_(std::min<int64_t>(kernels.tile_elements, Rows::kMaxColumns) * element_bytes_),
        panel_n_(std::min(kMaxPanelN, Rows::kPanelBytes / row_bytes_)),
        rows_(dequant, kernels, problem.weight, panel_n_),
        convert_{kernels.convert[problem.dtype - 1], kKernelStep, element_bytes(problem.dtype),
                 element_bytes_} {}

  // Processes all of n for some rows of x, which stay in the L2 cache.
  void operator()(RowRange n) {
    const int64_t groups = ceil_divide(problem_.m, Rows::kPanelM);
    for (int64_t group = 0; group < groups; ++group) {
      const RowRange m{problem_.m * group / groups, problem_.m * (group + 1) / groups};
      for (int64_t i = n.begin; i < n.end; i += rows_.block_n())
        multiply({i, std::min(n.end, i + rows_.block_n())}, n, m);
    }
  }

 private:
  void multiply(RowRange n, RowRange all, RowRange m) {
    float sums[Rows::kPanelM * Rows::kBlockN] = {};
    for (int64_t k = 0; k < weight_.cols;) {
      const int64_t elements = part_of_row(weight_.cols - k);
      rows_.load(n, all, k, elements);
      for (int64_t i = n.begin; i < n.end; i += panel_n_) {
        const RowRange panel{i, std::min(n.end, i + panel_n_)};
        for (int64_t row = panel.begin; row < panel.end; ++row)
          rows_(row, k, elements, panel_ + (row - i) * row_bytes_);
        add_products(static_cast<int>(panel.end - i), m, k, elements, sums + (i - n.begin));
      }
      k += elements;
    }
    const Sums done{n, m, sums, Rows::kBlockN};
    add_adapter(kernels_, problem_, done);
    store_sums(problem_, done);
  }

  // Takes whole steps as long as there are any.
  int64_t part_of_row(int64_t left) const {
    if (left < kKernelStep) return left;
    const int64_t whole = left - left % kKernelStep;
    // The gathered part is as large as the converted part.
    const int64_t gathered = has_plain_x(problem_) ? whole : kConvertedBytes / element_bytes_;
    return std::min({int64_t{kernels_.tile_elements}, rows_.max_columns(), whole, gathered});
  }

  void add_products(int n, RowRange m, int64_t k, int64_t elements, float *sums) {
    const bool in_place =
        convert_.convert == nullptr && elements % kKernelStep == 0 && has_plain_x(problem_);
    for (int64_t i = m.begin; i < m.end; i += kernels_.tile_m) {
      const int count = static_cast<int>(std::min<int64_t>(kernels_.tile_m, m.end - i));
      if (!in_place) convert(i, count, k, elements);
      kernels_.tile(
          {panel_, row_bytes_ / element_bytes_, in_place ? address_of_x(problem_, i, k) : x_,
           in_place ? problem_.x_stride : kConvertedBytes / element_bytes_, to_steps(elements), n,
           count, sums + (i - m.begin) * Rows::kBlockN, Rows::kBlockN});
    }
  }

  void convert(int64_t first_m, int m, int64_t k, int64_t elements) {
    for (int i = 0; i < m; ++i) {
      const char *x = part_of_x(problem_, first_m + i, k, elements, gathered_);
      char *out = x_ + i * kConvertedBytes;
      if (convert_.convert != nullptr) {
        convert_(x, elements, out);
      } else {
        std::memcpy(out, x, elements * element_bytes_);
        std::memset(out + elements * element_bytes_, 0,
                    (to_steps(elements) - elements) * element_bytes_);
      }
    }
  }

  const MatmulKernels &kernels_;
  const Problem &problem_;
  const decltype(Problem::weight) &weight_;
  const int64_t element_bytes_;  // per element of the panel
  const int64_t row_bytes_;      // per row of the panel
  const int64_t panel_n_;
  Rows rows_;
  const PaddedConversion convert_;
  alignas(64) char panel_[Rows::kPanelBytes];
  alignas(64) char x_[kMaxTileM * kConvertedBytes];
  alignas(64) char gathered_[kConvertedBytes];
};

}  // namespace

void matmul_panel(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const MatmulProblem &problem, RowRange n) {
  PanelMultiplier<Nf4Rows, MatmulProblem>(dequant, kernels, problem)(n);
}

void matmul_panel(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const Int4MatmulProblem &problem, RowRange n) {
  PanelMultiplier<IntegerRows, Int4MatmulProblem>(dequant, kernels, problem)(n);
}

void matmul_panel(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const DenseProblem &problem, RowRange n) {
  PanelMultiplier<DenseRows, DenseProblem>(dequant, kernels, problem)(n);
}

}  // namespace nf4::cpu
