// How the CTAs of one launch are divided between several weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "problem.hpp"

namespace nf4::cuda {

struct WeightSize {
  int64_t rows;  // 1 or more, of both
  int64_t cols;
};

// Gives every weight at least one CTA and at most one per row, so that the largest number of
// elements of a CTA is least. There are more CTAs than weights.
inline void partition_ctas(const WeightSize *weights, int count, int64_t ctas, int64_t *ctas_of) {
  int64_t elements = 0, widest = 0;
  for (int i = 0; i < count; ++i) {
    elements += weights[i].rows * weights[i].cols;
    widest = std::max(widest, weights[i].cols);
  }
  // With this many elements a CTA there are enough CTAs, although a share is whole rows and each
  // weight's number is rounded up. So the best partition gives no weight fewer.
  const int64_t enough = ceil_divide(elements, ctas - count) + widest;
  for (int i = 0; i < count; ++i)
    ctas_of[i] = ceil_divide(weights[i].rows, enough / weights[i].cols);
  const auto share = [&](int i) {
    return ceil_divide(weights[i].rows, ctas_of[i]) * weights[i].cols;
  };
  int64_t left = ctas - std::accumulate(ctas_of, ctas_of + count, int64_t{0});
  for (; left > 0; --left) {
    int most = -1;
    for (int i = 0; i < count; ++i)
      if (ctas_of[i] < weights[i].rows && (most < 0 || share(i) > share(most))) most = i;
    if (most < 0) return;
    ++ctas_of[most];
  }
}

}  // namespace nf4::cuda
