// Some columns of up to kMaxPairsM rows of x as pairs of integers (PairUnit in kernels.hpp).
#pragma once

#include <limits>

#include "cpu/matmul/code_rows.hpp"
#include "cpu/matmul/parts.hpp"

namespace nf4::cpu {

// The largest entry, with zeros, for which the magnitudes of x have the room that split_pairs
// needs.
constexpr int kMostPairEntry = 4095;

template <class Problem>
class PairsOfX {
 public:
  static constexpr int64_t kMaxNumbers = 16384;  // of all rows together
  static constexpr int64_t kMaxColumns = 1024;

  PairsOfX(const MatmulKernels &kernels, const DotKernels &dot, const Problem &problem,
           const PairOrder &order)
      : dot_(dot), problem_(problem), order_(order), prepare_(kernels, dot, problem) {}

  // Splits the stored columns from k on, and tells whether integers suit them. Does nothing if that
  // was already done. `unit` is that of the entries, of which the largest is at most
  // kMostPairEntry.
  bool split(RowRange m, int64_t k, int64_t elements, float unit, int largest) {
    if (k_ == k) return true;
    k_ = k;
    count_m_ = m.end - m.begin;
    rest_count_ = 0;
    for (int64_t first = 0; first < elements; first += kPairUnit) {
      const int64_t count = std::min(kPairUnit, elements - first);
      for (int64_t i = 0; i < count_m_; ++i) {
        alignas(64) char padded[kPairUnit * sizeof(uint16_t)];
        const int64_t at = first / kPairUnit * count_m_ + i;
        const int rests = dot_.split_pairs(
            {unit_of_x(m.begin + i, k + first, count, padded), order_,
             std::numeric_limits<int32_t>::max() / largest, unit, x_ + at * kPairUnit, scales_ + at,
             rests_ + rest_count_, static_cast<int16_t>(i), static_cast<int16_t>(first)});
        rest_count_ += rests;
        if (rests < 0 || rest_count_ > kMaxRests - kPairUnit) return false;
      }
      rest_end_[first / kPairUnit] = rest_count_;
      if (rest_count_ > kFewRests + (first + kPairUnit) * count_m_ / kNumbersOfRest) return false;
    }
    return true;
  }

  // The arguments for units from `unit` on; codes, scales and sums are the caller's.
  PairsArgs args_of(int64_t unit, int64_t units) const {
    const int64_t rest = unit == 0 ? 0 : rest_end_[unit - 1];
    PairsArgs args{};
    args.units = static_cast<int>(units);
    args.x = x_ + unit * count_m_ * kPairUnit;
    args.x_scales = scales_ + unit * count_m_;
    args.m = static_cast<int>(count_m_);
    args.rests = rests_ + rest;
    args.rest_count = static_cast<int>(rest_end_[unit + units - 1] - rest);
    args.first_place = static_cast<int>(unit * kPairUnit);
    return args;
  }

 private:
  // fp32 is faster if there are more rests than kFewRests and one for each kNumbersOfRest numbers.
  static constexpr int64_t kNumbersOfRest = 24, kFewRests = 64;
  static constexpr int64_t kMaxRests = 2048;

  // A unit of a row of x, in place or padded with zeros.
  const uint16_t *unit_of_x(int64_t m, int64_t k, int64_t count, char *padded) const {
    if (count == kPairUnit)
      return reinterpret_cast<const uint16_t *>(part_of_x(problem_, m, k, count, padded));
    prepare_.copy(m, k, count, padded);
    return reinterpret_cast<const uint16_t *>(padded);
  }

  const DotKernels &dot_;
  const Problem &problem_;
  const PairOrder &order_;
  const UnitsOfX<Problem> prepare_;
  int64_t k_ = -1;
  int64_t count_m_ = 0;
  int64_t rest_count_ = 0;
  int64_t rest_end_[kMaxColumns / kPairUnit];
  float scales_[kMaxNumbers / kPairUnit];
  PairRest rests_[kMaxRests];
  alignas(64) int16_t x_[kMaxNumbers];  // [unit][m][kPairUnit]
};

}  // namespace nf4::cpu
