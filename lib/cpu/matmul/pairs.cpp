// Matmul of rows of codes, of either kind of weight, for several rows of x in bf16, in integers: a
// lane is a row of the weight.
//
// Codes of 16 rows and 256 columns are decoded into the L1 cache, pair by pair of columns, and
// multiplied with all rows of x (pair_loops.hpp). docs/design/cpu.md has the rates.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/matmul/code_rows.hpp"
#include "cpu/matmul/parts.hpp"

namespace nf4::cpu {
namespace {

// The numbers of x that are split at once, and the sums.
constexpr int64_t kMaxSplit = 16384;
constexpr int64_t kMaxColumns = 1024;
constexpr int64_t kSums = 16384;
// The columns that are decoded at once.
constexpr int64_t kColumns = 256;
static_assert(kMaxSplit / kMaxPairsM >= kColumns, "all rows of x have room");
constexpr int64_t kMaxScales = kMaxColumns / kMinBlocksize + 2;
// With more rests than one for so many numbers, and these, fp32 is faster.
constexpr int64_t kNumbersOfRest = 24, kFewRests = 64;
constexpr int64_t kMaxRests = 2048;
// The largest integer that is added to entries as a zero, and the largest entry with it, for which
// the sum of some magnitudes of x has the room that split_pairs needs.
constexpr int kMostZero = 8, kMostEntry = 4095;

template <class Rows, class Problem>
class PairMultiplier {
 public:
  PairMultiplier(const MatmulKernels &kernels, const Problem &problem, const Rows &rows)
      : kernels_(kernels),
        dot_(kernels.*Rows::kDot),
        problem_(problem),
        rows_(rows),
        cols_(problem.weight.cols),
        prepare_(kernels, dot_, problem),
        codebook_(split_codebook(static_cast<const uint16_t *>(rows.codebook()))),
        most_entry_(codebook_.largest + (rows.has_zeros() ? kMostZero : 0)),
        per_scale_(elements_per_scale(rows, cols_, kPairUnit)) {}

  // Returns false, and has stored nothing, if integers do not suit the codebook or these rows of x.
  bool operator()(RowRange n, RowRange m) {
    if (codebook_.unit == 0 || most_entry_ > kMostEntry) return false;
    m_ = m;
    count_m_ = m.end - m.begin;
    columns_ = std::min(kMaxColumns, kMaxSplit / count_m_ / kColumns * kColumns);
    block_n_ = std::min(kSums / count_m_ / kPairLanes, ceil_divide(n.end - n.begin, kPairLanes)) *
               kPairLanes;
    for (int64_t i = n.begin; i < n.end; i += block_n_)
      if (!multiply({i, std::min(n.end, i + block_n_)})) return false;
    return true;
  }

 private:
  bool multiply(RowRange n) {
    std::fill_n(sums_, count_m_ * block_n_, 0.0f);
    for (int64_t k = 0; k < cols_; k += columns_) {
      const int64_t elements = std::min(columns_, cols_ - k);
      if (!split(k, elements)) return false;
      for (int64_t i = n.begin; i < n.end; i += kPairLanes)
        add_products({i, std::min(n.end, i + kPairLanes)}, n, k, elements);
    }
    for (int64_t i = 0; i < count_m_ * block_n_; ++i) sums_[i] *= rows_.unit();
    const Sums done{n, m_, sums_, block_n_};
    add_adapter(kernels_, problem_, done);
    store_sums(problem_, done);
    return true;
  }

  // Splits some columns of all rows of x, and tells whether integers suit them. Does nothing if
  // that was already done for the previous block of rows.
  bool split(int64_t k, int64_t elements) {
    if (split_k_ == k) return true;
    split_k_ = k;
    const int64_t units = ceil_divide(elements, kPairUnit);
    rest_count_ = 0;
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t first = unit * kPairUnit, count = std::min(kPairUnit, elements - first);
      for (int64_t m = 0; m < count_m_; ++m) {
        alignas(64) char padded[kPairUnit * sizeof(uint16_t)];
        const int64_t at = unit * count_m_ + m;
        const int rests =
            dot_.split_pairs({unit_of_x(m_.begin + m, k + first, count, padded),
                              std::numeric_limits<int32_t>::max() / most_entry_, codebook_.unit,
                              x_ + at * kPairUnit, x_scales_ + at, rests_ + rest_count_,
                              static_cast<int16_t>(m), static_cast<int16_t>(first)});
        rest_count_ += rests;
        if (rests < 0 || rest_count_ > kMaxRests - kPairUnit) return false;
      }
      rest_end_[unit] = rest_count_;
      if (rest_count_ > kFewRests + (first + kPairUnit) * count_m_ / kNumbersOfRest) return false;
    }
    return true;
  }

  // A unit of a row of x, in place or padded with zeros.
  const uint16_t *unit_of_x(int64_t m, int64_t k, int64_t count, char *padded) const {
    if (count == kPairUnit)
      return reinterpret_cast<const uint16_t *>(part_of_x(problem_, m, k, count, padded));
    prepare_.copy(m, k, count, padded);
    return reinterpret_cast<const uint16_t *>(padded);
  }

  // Adds the products of rows n of a block.
  void add_products(RowRange n, RowRange block, int64_t k, int64_t elements) {
    read_scales(n, k, elements);
    const bool last = n.end == block.end;
    const uint8_t *const next = rows_.packed() + (last ? block.begin : n.end) * rows_.row_bytes() +
                                (last ? k + elements : k) / 2;
    for (int64_t i = 0; i < elements; i += kColumns) {
      const int64_t count = std::min(kColumns, elements - i);
      decode(n, k + i, count, i / per_scale_);
      const int64_t unit = i / kPairUnit, end = ceil_divide(i + count, kPairUnit);
      const int64_t first_rest = unit == 0 ? 0 : rest_end_[unit - 1];
      dot_.multiply_pairs({codes_, scales_ + i / per_scale_ * kPairLanes, scales_per_unit(),
                           static_cast<int>(end - unit), x_ + unit * count_m_ * kPairUnit,
                           x_scales_ + unit * count_m_, static_cast<int>(count_m_),
                           rests_ + first_rest, static_cast<int>(rest_end_[end - 1] - first_rest),
                           static_cast<int>(unit * kPairUnit), sums_ + (n.begin - block.begin),
                           block_n_, next + i / 2, rows_.row_bytes()});
    }
  }

  int scales_per_unit() const { return static_cast<int>(kPairUnit / per_scale_); }

  // Reads the scales of rows n from column k on, with a lane for each row.
  void read_scales(RowRange n, int64_t k, int64_t elements) {
    const int64_t scales = elements / per_scale_;
    for (int64_t i = 0; i < n.end - n.begin; ++i) {
      rows_.prefetch(n.begin + i + kPairLanes, k, elements);
      rows_.read(n.begin + i, k, elements, per_scale_, row_scales_ + i * kRowScales,
                 row_zeros_ + i * kRowScales);
    }
    transpose(row_scales_, scales, scales_);
    if (rows_.has_zeros()) transpose(row_zeros_, scales, zeros_);
  }

  // Zeros follow the last scale, for the end of a last unit.
  void transpose(const float *rows, int64_t count, float *out) const {
    for (int64_t i = 0; i < kPairLanes; i += kTransposedM)
      kernels_.transpose_x(rows + i * kRowScales, kRowScales,
                           ceil_divide(count, kTransposedM) * kTransposedM, out + i, kPairLanes);
    std::fill_n(out + count * kPairLanes, kPairLanes, 0.0f);
  }

  void decode(RowRange n, int64_t k, int64_t count, int64_t scale) {
    const uint8_t *packed = rows_.packed() + n.begin * rows_.row_bytes() + k / 2;
    int64_t row_bytes = rows_.row_bytes();
    uint8_t padded[kPairLanes][kColumns / 2];
    if (count % kPairUnit != 0) {
      for (int64_t i = 0; i < n.end - n.begin; ++i) {
        std::memcpy(padded[i], packed + i * row_bytes, count / 2);
        std::memset(padded[i] + count / 2, 0, kColumns / 2 - count / 2);
      }
      packed = padded[0];
      row_bytes = kColumns / 2;
    }
    dot_.decode_pairs({codebook_.entries, packed, row_bytes, static_cast<int>(n.end - n.begin),
                       static_cast<int>(ceil_divide(count, kPairUnit)),
                       rows_.has_zeros() ? zeros_ + scale * kPairLanes : nullptr, scales_per_unit(),
                       codes_});
  }

  static constexpr int64_t kRowScales = kMaxScales + kScalePadding;
  static constexpr int64_t kMaxUnits = kMaxSplit / kPairUnit;

  const MatmulKernels &kernels_;
  const DotKernels &dot_;
  const Problem &problem_;
  const Rows rows_;
  const int64_t cols_;
  const UnitsOfX<Problem> prepare_;
  const SplitCodebook codebook_;
  const int most_entry_;
  const int64_t per_scale_;  // in elements: 32 or 64
  RowRange m_{};
  int64_t count_m_ = 0;
  int64_t columns_ = 0;
  int64_t block_n_ = 0;
  int64_t split_k_ = -1;
  int64_t rest_count_ = 0;
  int64_t rest_end_[kMaxColumns / kPairUnit];
  float x_scales_[kMaxUnits];
  float row_scales_[kPairLanes * kRowScales] = {};
  float row_zeros_[kPairLanes * kRowScales] = {};
  alignas(64) float scales_[kRowScales * kPairLanes];
  alignas(64) float zeros_[kRowScales * kPairLanes];
  PairRest rests_[kMaxRests];
  alignas(64) int16_t x_[kMaxSplit];                  // [unit][m][kPairUnit]
  alignas(64) int16_t codes_[kColumns * kPairLanes];  // [pair][kPairLanes][2]
  alignas(64) float sums_[kSums];                     // [m][block_n_]
};

}  // namespace

bool matmul_pairs(const MatmulKernels &kernels, const MatmulProblem &problem,
                  const RoundedCodebook &bf16_codebook, RowRange n, RowRange m) {
  if (problem.weight.low_nibble_first()) {
    using Multiplier = PairMultiplier<E2m1Rows, MatmulProblem>;
    return Multiplier(kernels, problem, {kernels, problem.weight, bf16_codebook})(n, m);
  }
  using Multiplier = PairMultiplier<CodebookRows, MatmulProblem>;
  return Multiplier(kernels, problem, {kernels, problem.weight, bf16_codebook})(n, m);
}

bool matmul_pairs(const DequantKernels &dequant, const MatmulKernels &kernels,
                  const Int4MatmulProblem &problem, RowRange n, RowRange m) {
  using Multiplier = PairMultiplier<IntegerRows, Int4MatmulProblem>;
  return Multiplier(kernels, problem, {dequant, kernels, problem.weight})(n, m);
}

}  // namespace nf4::cpu
