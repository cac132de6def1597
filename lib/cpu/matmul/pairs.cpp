// Matmul of rows of codes, of either kind of weight, for several rows of x in bf16, in integers: a
// lane is a row of the weight.
//
// Codes of 16 rows and 256 columns are decoded into the L1 cache, pair by pair of columns, and
// multiplied with all rows of x (pair_loops.hpp). docs/design/cpu.md has the rates.
#include <algorithm>
#include <cstring>

#include "cpu/matmul/pairs_of_x.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kSums = 12288;
// The columns that are decoded at once.
constexpr int64_t kColumns = 256;
// The largest integer that is added to entries as a zero.
constexpr int kMostZero = 8;

template <class Rows, class Problem>
class PairMultiplier {
 public:
  PairMultiplier(const MatmulKernels &kernels, const Problem &problem, const Rows &rows)
      : kernels_(kernels),
        dot_(kernels.*Rows::kDot),
        problem_(problem),
        rows_(rows),
        cols_(problem.weight.cols),
        codebook_(split_codebook(static_cast<const uint16_t *>(rows.codebook()))),
        most_entry_(codebook_.largest + (rows.has_zeros() ? kMostZero : 0)),
        per_scale_(elements_per_scale(rows, cols_, kPairUnit)),
        x_(kernels, dot_, problem, kRowPairs) {}

  // Returns false, and has stored nothing, if integers do not suit the codebook or these rows of x.
  bool operator()(RowRange n, RowRange m) {
    if (codebook_.unit == 0 || most_entry_ > kMostPairEntry) return false;
    m_ = m;
    count_m_ = m.end - m.begin;
    columns_ = std::min(X::kMaxColumns, X::kMaxNumbers / count_m_ / kColumns * kColumns);
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
      if (!x_.split(m_, k, elements, codebook_.unit, most_entry_)) return false;
      for (int64_t i = n.begin; i < n.end; i += kPairLanes)
        add_products({i, std::min(n.end, i + kPairLanes)}, n, k, elements);
    }
    for (int64_t i = 0; i < count_m_ * block_n_; ++i) sums_[i] *= rows_.unit();
    const Sums done{n, m_, sums_, block_n_};
    add_adapter(kernels_, problem_, done);
    store_sums(problem_, done);
    return true;
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
      PairsArgs args = x_.args_of(i / kPairUnit, ceil_divide(count, kPairUnit));
      args.codes = codes_;
      args.scales = scales_ + i / per_scale_ * kPairLanes;
      args.scales_per_unit = scales_per_unit();
      args.sums = sums_ + (n.begin - block.begin);
      args.sums_stride = block_n_;
      args.next = next + i / 2;
      args.row_bytes = rows_.row_bytes();
      dot_.multiply_pairs(args);
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

  using X = PairsOfX<Problem>;
  static_assert(X::kMaxNumbers / kMaxPairsM >= kColumns, "all rows of x have room");
  static constexpr int64_t kRowScales = X::kMaxColumns / kMinBlocksize + 2 * kScalePadding;

  const MatmulKernels &kernels_;
  const DotKernels &dot_;
  const Problem &problem_;
  const Rows rows_;
  const int64_t cols_;
  const SplitCodebook codebook_;
  const int most_entry_;
  const int64_t per_scale_;  // in elements: 32 or 64
  RowRange m_{};
  int64_t count_m_ = 0;
  int64_t columns_ = 0;
  int64_t block_n_ = 0;
  X x_;
  float row_scales_[kPairLanes * kRowScales] = {};
  float row_zeros_[kPairLanes * kRowScales] = {};
  alignas(64) float scales_[kRowScales * kPairLanes];
  alignas(64) float zeros_[kRowScales * kPairLanes];
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
