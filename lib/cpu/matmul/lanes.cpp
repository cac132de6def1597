// Matmul of rows of codes, of either kind of weight, for more than a few rows of x in bf16: a lane
// is a row of the weight.
//
// Codes of a block of rows and columns are transposed, so that a vector has a word of each of 16
// rows. The kernel looks them up, multiplies them with x, and applies the scales to the sums of a
// quantization block. Sums of x serve zero points. 128 weights take 6 instructions to transpose and
// 8 to look up for up to 12 rows of x. The 4 vdpbf16ps for each row of x are the bound.
// docs/design/cpu.md has the rates.
#include <algorithm>
#include <type_traits>

#include "cpu/matmul/code_rows.hpp"
#include "cpu/matmul/parts.hpp"

namespace nf4::cpu {
namespace {

// The most rows of x that are kept at once, and the sums. The sums cover at least some blocks of
// rows of the weight; the more they cover, the less often x is prepared.
constexpr int64_t kGroupM = 64;
constexpr int64_t kSums = 8192;
constexpr int64_t kLanes = 16;
// The columns processed at once. Longer parts of rows are read better; with many rows of x there is
// room for half as many columns.
constexpr int64_t kColumns = 1024;
constexpr int64_t kMaxPrepared = kGroupM * kColumns / 2;
constexpr int64_t kMaxScales = kColumns / kMinBlocksize;
static_assert(kMaxScales + 1 <= kMaxRowScales, "what is read at once");

template <class Rows, class Problem>
class LaneMultiplier {
 public:
  LaneMultiplier(const MatmulKernels &kernels, const Problem &problem, const Rows &rows)
      : kernels_(kernels),
        problem_(problem),
        rows_(rows),
        cols_(problem.weight.cols),
        per_scale_(elements_per_scale(rows, cols_, kColumns / 2)) {}

  // Processes all of n for some rows of x, which stay in the L2 cache.
  void operator()(RowRange n) {
    const int64_t groups = ceil_divide(problem_.m, kGroupM);
    for (int64_t group = 0; group < groups; ++group) {
      m_ = {problem_.m * group / groups, problem_.m * (group + 1) / groups};
      parts_ = ceil_divide(m_.end - m_.begin, kMaxLaneM);
      columns_ = m_.end - m_.begin > kGroupM / 2 ? kColumns / 2 : kColumns;
      const int64_t blocks =
          std::min(std::max(kMinBlocks, kSums / kLaneBlockN / (m_.end - m_.begin)),
                   ceil_divide(n.end - n.begin, kLaneBlockN));
      block_n_ = blocks * kLaneBlockN;
      for (int64_t i = n.begin; i < n.end; i += block_n_)
        multiply({i, std::min(n.end, i + block_n_)});
    }
  }

 private:
  // Blocks that fit on the stack; codebook weights also need room for an adapter.
  static constexpr int64_t kMinBlocks = std::is_same_v<Problem, Int4MatmulProblem> ? 6 : 4;
  static constexpr int64_t kMaxSums = kGroupM * kMinBlocks * kLaneBlockN;
  static_assert(kMaxSums >= kSums, "few rows of x");

  void multiply(RowRange n) {
    const int64_t count = (m_.end - m_.begin) * block_n_;
    std::fill_n(sums_, count, 0.0f);
    for (int64_t k = 0; k < cols_; k += columns_) {
      const int64_t elements = std::min(columns_, cols_ - k);
      prepare(k, elements);
      for (int64_t i = n.begin; i < n.end; i += kLaneBlockN) {
        const RowRange rows{i, std::min(n.end, i + kLaneBlockN)};
        for (int64_t row = i; row < rows.end; row += kLanes)
          load({row, std::min(rows.end, row + kLanes)}, row - i, k, elements);
        const bool last = rows.end == n.end, in_rows = !last || k + elements < cols_;
        const int64_t next_n = last && in_rows ? n.begin : rows.end;
        const int64_t next_k = !last ? k : in_rows ? k + elements : 0;
        for (int64_t row = 0; row < kLaneBlockN; ++row)
          rows_.prefetch(next_n + row, next_k, elements);
        add_products(rows, elements, sums_ + (i - n.begin),
                     rows_.packed() + next_n * rows_.row_bytes() + next_k / 2);
      }
    }
    for (int64_t i = 0; i < count; ++i) sums_[i] *= rows_.unit();
    const Sums done{n, m_, sums_, block_n_};
    add_adapter(kernels_, problem_, done);
    store_sums(problem_, done);
  }

  // Loads the codes and scales of a vector of rows into lane `at` and the lanes after it.
  void load(RowRange n, int64_t at, int64_t k, int64_t elements) {
    const int rows = static_cast<int>(n.end - n.begin);
    kernels_.transpose_codes(rows_.packed() + n.begin * rows_.row_bytes() + k / 2,
                             rows_.row_bytes(), rows, elements / kCodesPerWord, codes_ + at);
    const int64_t count = elements / per_scale_;
    for (int64_t row = 0; row < rows; ++row)
      rows_.read(n.begin + row, k, elements, per_scale_, row_scales_ + row * kMaxScales,
                 row_zeros_ + row * kMaxScales);
    kernels_.transpose_scales(row_scales_, kMaxScales, count, scales_ + at);
    if (rows_.has_zeros()) kernels_.transpose_scales(row_zeros_, kMaxScales, count, zeros_ + at);
  }

  // Splits the rows of x, counted in m_, into parts that are as even as possible.
  RowRange rows_of_part(int64_t part) const {
    const int64_t count = m_.end - m_.begin;
    return {count * part / parts_, count * (part + 1) / parts_};
  }

  int64_t x_sums_stride() const { return columns_ / kMinBlocksize; }

  // Prepares 8 columns of all rows of a part, and then the next 8.
  void prepare(int64_t k, int64_t elements) {
    char *const gathered = reinterpret_cast<char *>(codes_);  // the codes are loaded afterwards
    for (int64_t part = 0; part < parts_; ++part) {
      const RowRange m = rows_of_part(part);
      for (int64_t i = m.begin; i < m.end; ++i) {
        const char *x = part_of_x(problem_, m_.begin + i, k, elements, gathered);
        if (rows_.has_zeros())
          kernels_.column_sums(x, per_scale_, per_scale_, elements / per_scale_,
                               x_sums_ + i * x_sums_stride());
        kernels_.pair_for_lanes(x, elements, Rows::kHighFirst,
                                x_ + m.begin * elements + (i - m.begin) * kCodesPerWord,
                                (m.end - m.begin) * kCodesPerWord);
      }
    }
  }

  // `next` is the codes that are loaded next.
  void add_products(RowRange n, int64_t elements, float *sums, const uint8_t *next) {
    for (int64_t part = 0; part < parts_; ++part) {
      const RowRange m = rows_of_part(part);
      kernels_.lanes({rows_.codebook(), codes_, scales_, per_scale_, x_ + m.begin * elements,
                      elements, static_cast<int>(ceil_divide(n.end - n.begin, kLanes) * kLanes),
                      static_cast<int>(m.end - m.begin), sums + m.begin * block_n_, block_n_,
                      part == 0 ? next : nullptr, rows_.row_bytes(),
                      rows_.has_zeros() ? zeros_ : nullptr, x_sums_ + m.begin * x_sums_stride(),
                      x_sums_stride()});
    }
  }

  const MatmulKernels &kernels_;
  const Problem &problem_;
  const Rows rows_;
  const int64_t cols_;
  const int64_t per_scale_;  // in elements
  int64_t parts_ = 0;
  int64_t columns_ = 0;
  int64_t block_n_ = 0;
  RowRange m_{};
  alignas(64) uint32_t codes_[kColumns / kCodesPerWord * kLaneBlockN];
  float row_scales_[kLanes * kMaxScales] = {};
  float row_zeros_[kLanes * kMaxScales] = {};
  alignas(64) float scales_[kMaxScales * kLaneBlockN];
  alignas(64) float zeros_[kMaxScales * kLaneBlockN];
  float x_sums_[kGroupM / 2 * kMaxScales];
  alignas(64) uint16_t x_[kMaxPrepared];
  alignas(64) float sums_[kMaxSums];
};

}  // namespace

void matmul_lanes(const MatmulKernels &kernels, const MatmulProblem &problem,
                  const RoundedCodebook &bf16_codebook, RowRange n) {
  if (problem.weight.low_nibble_first()) {
    using Multiplier = LaneMultiplier<E2m1Rows, MatmulProblem>;
    return Multiplier(kernels, problem, {kernels, problem.weight, bf16_codebook})(n);
  }
  using Multiplier = LaneMultiplier<CodebookRows, MatmulProblem>;
  Multiplier(kernels, problem, {kernels, problem.weight, bf16_codebook})(n);
}

void matmul_lanes(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const Int4MatmulProblem &problem, RowRange n) {
  using Multiplier = LaneMultiplier<IntegerRows, Int4MatmulProblem>;
  Multiplier(kernels, problem, {dequant, kernels, problem.weight})(n);
}

}  // namespace nf4::cpu
