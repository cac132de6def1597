// Matmul of words of GPTQ and AWQ in integers, with a lane for each row of the weight (pairs.cpp).
// A word's nibbles become integers by a shift and a mask. Words of 128 columns are read along the
// rows of the weight, so that memory is read in long pieces.
#include <algorithm>

#include "cpu/dequant/int4_groups.hpp"
#include "cpu/matmul/pairs_of_x.hpp"

namespace nf4::cpu {
namespace {

static_assert(kWordTiles * kPairLanes == kInt4PerWord * kTransposedM, "to_lanes");
constexpr int64_t kUnits = 2;
constexpr int64_t kColumns = kUnits * kPairUnit;
constexpr int64_t kRows = kWordTiles * kPairLanes;  // that are decoded at once
constexpr int64_t kSums = 12288;
// A code, or a zero with which it is 0.
constexpr int kMostCode = 15;
constexpr int64_t kMaxScales = 2 * kUnits;

class WordPairMultiplier {
 public:
  WordPairMultiplier(const DequantKernels &dequant, const MatmulKernels &kernels,
                     const Int4MatmulProblem &problem)
      : dequant_(dequant),
        kernels_(kernels),
        dot_(kernels.int4_dot),
        problem_(problem),
        weight_(problem.weight),
        awq_(problem.weight.layout == NF4_INT4_AWQ),
        scales_per_unit_(weight_.groups == 1 || weight_.group_size % kPairUnit == 0 ? 1 : 2),
        x_(kernels, kernels.int4_dot, problem, awq_ ? kAwqPairs : kGptqPairs) {}

  // Returns false, and has stored nothing, if integers do not suit these rows of x.
  bool operator()(RowRange n, RowRange m) {
    m_ = m;
    block_n_ =
        std::min(kSums / (m.end - m.begin) / kRows, ceil_divide(n.end - n.begin, kRows)) * kRows;
    for (int64_t i = n.begin; i < n.end; i += block_n_)
      if (!multiply({i, std::min(n.end, i + block_n_)})) return false;
    return true;
  }

 private:
  bool multiply(RowRange n) {
    const int64_t count_m = m_.end - m_.begin;
    std::fill_n(sums_, count_m * block_n_, 0.0f);
    for (int64_t k = 0; k < weight_.cols; k += kColumns) {
      const int64_t elements = std::min(kColumns, weight_.cols - k);
      if (!x_.split(m_, k, elements, 1, kMostCode)) return false;
      for (int64_t i = n.begin; i < n.end; i += kRows)
        add_products({i, std::min(n.end, i + kRows)}, k, elements, sums_ + (i - n.begin));
    }
    if (awq_)
      for (int64_t i = 0; i < count_m * block_n_; i += kRows) sort(sums_ + i);
    store_sums(problem_, {n, m_, sums_, block_n_});
    return true;
  }

  // Adds the products of up to kRows rows.
  void add_products(RowRange n, int64_t k, int64_t elements, float *sums) {
    const int units = static_cast<int>(ceil_divide(elements, kPairUnit));
    const int64_t scales = units * scales_per_unit_;
    read_scales(n, k, scales);
    const int64_t row = awq_ ? k * (weight_.rows / kInt4PerWord) + n.begin / kInt4PerWord
                             : k / kInt4PerWord * weight_.rows + n.begin;
    (awq_ ? dot_.decode_awq_pairs : dot_.decode_gptq_pairs)(
        {weight_.packed + row, awq_ ? weight_.rows / kInt4PerWord : weight_.rows, n.end - n.begin,
         elements, units, zeros_, scales_per_unit_, codes_});
    PairsArgs args = x_.args_of(0, units);
    args.scales_per_unit = scales_per_unit_;
    args.sums_stride = block_n_;
    const int64_t tiles = awq_ ? kWordTiles : ceil_divide(n.end - n.begin, kPairLanes);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      args.codes = codes_ + tile * units * kUnitPairs * 2 * kPairLanes;
      args.scales = scales_ + tile * scales * kPairLanes;
      args.sums = sums + tile * kPairLanes;
      dot_.multiply_pairs(args);
    }
  }

  // Reads the scales, and what is added to codes, of rows n: [tile][scale][kPairLanes].
  void read_scales(RowRange n, int64_t k, int64_t count) {
    for (int64_t i = 0, group = -1; i < count; ++i) {
      const int64_t next = (k + i * kPairUnit / scales_per_unit_) / weight_.group_size;
      if (next == weight_.groups)
        std::fill_n(lane_scales_, kRows, 0.0f);  // beyond the last column: 0 * infinity is NaN
      else if (next != group)
        read_group(n, next);
      group = next;
      for (int64_t tile = 0; tile < kWordTiles; ++tile) {
        const int64_t at = (tile * count + i) * kPairLanes;
        std::copy_n(lane_scales_ + tile * kPairLanes, kPairLanes, scales_ + at);
        std::copy_n(lane_zeros_ + tile * kPairLanes, kPairLanes, zeros_ + at);
      }
    }
  }

  // Reads those of a group, in the order of lanes.
  void read_group(RowRange n, int64_t group) {
    dequant_.groups(
        int4_groups(weight_, n.begin, group, n.end - n.begin, lane_scales_, lane_zeros_));
    if (weight_.zeros == nullptr) std::fill_n(lane_zeros_, kRows, 0.0f);
    for (int64_t i = 0; i < kRows; ++i) lane_zeros_[i] -= kInt4SymmetricZero;
    if (!awq_) return;
    to_lanes(lane_scales_);
    to_lanes(lane_zeros_);
  }

  // Brings numbers of kRows rows into the order of lanes.
  void to_lanes(float *numbers) const {
    constexpr int64_t kSide = kInt4PerWord;
    float by_row[kRows];
    kernels_.transpose_x(numbers, kSide, kSide, by_row, kSide);
    for (int64_t row = 0; row < kSide; ++row)
      std::copy_n(by_row + row * kSide, kSide, numbers + awq_nibble(static_cast<int>(row)) * kSide);
  }

  // The lane of a row of kRows.
  static int64_t awq_lane(int64_t row) {
    return awq_nibble(static_cast<int>(row % kInt4PerWord)) * (kRows / kInt4PerWord) +
           row / kInt4PerWord;
  }

  // Brings sums of kRows rows from the order of lanes into that of rows.
  static void sort(float *sums) {
    float by_lane[kRows];
    std::copy_n(sums, kRows, by_lane);
    for (int64_t row = 0; row < kRows; ++row) sums[row] = by_lane[awq_lane(row)];
  }

  const DequantKernels &dequant_;
  const MatmulKernels &kernels_;
  const DotKernels &dot_;
  const Int4MatmulProblem &problem_;
  const Int4Weight &weight_;
  const bool awq_;
  const int scales_per_unit_;
  RowRange m_{};
  int64_t block_n_ = 0;
  PairsOfX<Int4MatmulProblem> x_;
  float lane_scales_[kRows + kScalePadding] = {};
  float lane_zeros_[kRows + kScalePadding] = {};
  alignas(64) float scales_[kMaxScales * kRows];
  alignas(64) float zeros_[kMaxScales * kRows];
  alignas(64) int16_t codes_[kColumns * kRows] = {};
  alignas(64) float sums_[kSums];  // [m][block_n_]
};

}  // namespace

bool matmul_word_pairs(const DequantKernels &dequant, const MatmulKernels &kernels,
                       const Int4MatmulProblem &problem, RowRange n, RowRange m) {
  return WordPairMultiplier(dequant, kernels, problem)(n, m);
}

}  // namespace nf4::cpu
