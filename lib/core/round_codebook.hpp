// Rounds a caller's codebook to 16 bits, as tools/round_codebooks.py does with the codebooks of the
// formats (formats.hpp). It is fast, since a matmul waits for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/float16.hpp"
#include "core/formats.hpp"

namespace nf4 {

// Half a unit of a dtype's precision, and its bits of infinity.
template <class T>
struct Precision;
template <>
struct Precision<Half> {
  static constexpr double kHalfUnit = 0x1p-11;
  static constexpr uint16_t kInfinity = 0x7c00;
};
template <>
struct Precision<BFloat16> {
  static constexpr double kHalfUnit = 0x1p-8;
  static constexpr uint16_t kInfinity = 0x7f80;
};

// Tries factors. For each factor it tries to round at most one entry to its second nearest number.
// It keeps the result with the least cost, which combines the mean square error and the mean error
// of normal weights. Entries that are not finite are converted and do not count.
template <class T>
class CodebookRounding {
 public:
  explicit CodebookRounding(const float *codebook) : codebook_(codebook) {
    for (int i = 0; i < kCodebookSize; ++i)
      if (std::isfinite(codebook[i])) largest_ = std::max(largest_, std::fabs(codebook[i]));
    power_ = largest_ == 0 ? 1.0 : std::ldexp(1.0, std::max(std::ilogb(largest_), -125));
    for (int i = 0; i < kCodebookSize; ++i)
      values_[i] = std::isfinite(codebook[i]) ? codebook[i] / power_ : 0;
  }

  RoundedCodebook operator()() {
    if (largest_ != 0) {
      find_frequencies();
      for (int i = 0; i < kFactors; ++i) try_factor(1 + static_cast<double>(i) / kFactors);
    }
    const double unit = power_ / best_factor_;
    RoundedCodebook rounded{static_cast<float>(unit), {}};
    for (int i = 0; i < kCodebookSize; ++i)
      rounded.entries[i] = std::isfinite(codebook_[i]) ? nearest(values_[i] * best_factor_)
                                                       : from_float<T>(codebook_[i]).bits;
    if (best_moved_ >= 0)
      rounded.entries[best_moved_] =
          next_nearest(values_[best_moved_] * best_factor_, rounded.entries[best_moved_]);
    return rounded;
  }

 private:
  static constexpr int kFactors = 128;
  // The distributions of weights: normal, truncated at the usual absmax of a block of 32, 1024 or
  // 4096 elements, in standard deviations.
  static constexpr double kTails[] = {2.1, 3.2, 3.7};
  static constexpr int kDistributions = 3;
  // The weight of a mean error relative to a root mean square error. If a row of x has a nonzero
  // mean, mean errors add up with the number of columns and the others with its square root; 64 is
  // the root of 4096 columns.
  static constexpr double kWeightOfMean = 64;

  // Sums over all entries, relative to the weights' root mean square.
  struct Sums {
    double errors[kDistributions] = {};
    double squares = 0;  // the squares of errors, over all distributions

    double cost() const {
      double total = squares;
      for (const double mean : errors) total += kWeightOfMean * mean * kWeightOfMean * mean;
      return total;
    }
  };

  static double cdf(double x) { return 0.5 * std::erfc(-x * 0.7071067811865476); }

  // Finds how often weights of each distribution are stored as each entry.
  void find_frequencies() {
    int order[kCodebookSize];
    int count = 0;
    for (int i = 0; i < kCodebookSize; ++i)
      if (std::isfinite(codebook_[i])) order[count++] = i;
    std::sort(order, order + count, [&](int a, int b) { return values_[a] < values_[b]; });
    const double end = largest_ / power_;
    for (int d = 0; d < kDistributions; ++d) {
      double below = cdf(-kTails[d]);
      double square = 0;
      for (int i = 0; i < count; ++i) {
        const double value = values_[order[i]];
        const double bound = i + 1 < count ? (value + values_[order[i + 1]]) / 2 : end;
        const double next = cdf(bound / end * kTails[d]);
        error_weights_[d][order[i]] = next - below;
        square += (next - below) * value * value;
        below = next;
      }
      const double total = below - cdf(-kTails[d]);
      for (int i = 0; i < kCodebookSize; ++i) {
        square_weights_[i] += error_weights_[d][i] / square;
        error_weights_[d][i] /= std::sqrt(total * square);
      }
    }
  }

  void try_factor(double factor) {
    const double inverse = 1 / factor;
    double near[kCodebookSize], far[kCodebookSize];
    Sums sums;
    for (int i = 0; i < kCodebookSize; ++i) {
      const double scaled = values_[i] * factor;
      const uint16_t bits = nearest(scaled);
      near[i] = number(bits) * inverse - values_[i];
      add(sums, i, 0, near[i]);
      far[i] = may_move(scaled, bits) ? number(next_nearest(scaled, bits)) * inverse - values_[i]
                                      : near[i];
    }
    consider(sums, factor, -1);
    for (int i = 0; i < kCodebookSize; ++i) {
      if (far[i] == near[i]) continue;
      Sums moved = sums;
      add(moved, i, near[i], far[i]);
      consider(moved, factor, i);
    }
  }

  // Accounts for a change of entry i's error from `before` to `after`.
  void add(Sums &sums, int i, double before, double after) const {
    for (int d = 0; d < kDistributions; ++d)
      sums.errors[d] += error_weights_[d][i] * (after - before);
    sums.squares += square_weights_[i] * (after * after - before * before);
  }

  void consider(const Sums &sums, double factor, int moved) {
    const double cost = sums.cost();
    if (cost >= best_cost_) return;
    best_cost_ = cost;
    best_factor_ = factor;
    best_moved_ = moved;
  }

  static double number(uint16_t bits) { return to_float(T{bits}); }
  static uint16_t nearest(double x) { return from_float<T>(static_cast<float>(x)).bits; }
  // Returns the nearest number on the other side of x.
  static uint16_t next_nearest(double x, uint16_t bits) {
    return static_cast<uint16_t>(std::fabs(number(bits)) > std::fabs(x) ? bits - 1 : bits + 1);
  }
  static bool may_move(double x, uint16_t bits) {
    if (x == 0 || number(bits) == x || (bits & 0x7fff) == 0) return false;
    const uint16_t other = next_nearest(x, bits);
    return (other & 0x7fff) < Precision<T>::kInfinity &&
           std::fabs(number(other) - x) <= Precision<T>::kHalfUnit * std::fabs(x);
  }

  const float *codebook_;
  float largest_ = 0;
  // a power of two that scales the largest entry to [1, 2), or the unit to a normal float
  double power_;
  double values_[kCodebookSize];  // entries over power_; 0 for those that are not finite
  // factors of the entries in Sums::errors
  double error_weights_[kDistributions][kCodebookSize] = {};
  double square_weights_[kCodebookSize] = {};
  double best_cost_ = INFINITY;
  double best_factor_ = 1;
  int best_moved_ = -1;
};

// T is Half or BFloat16.
template <class T>
RoundedCodebook round_codebook(const float *codebook) {
  return CodebookRounding<T>(codebook)();
}

}  // namespace nf4
