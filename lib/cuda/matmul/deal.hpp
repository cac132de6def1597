// How the thread blocks of one launch are divided between several weights.
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

// Gives every weight one block or more, and none more than it has rows, so that the most elements
// that a block has are least. There are more blocks than weights.
inline void deal_blocks(const WeightSize *weights, int count, int64_t blocks, int64_t *dealt) {
  int64_t elements = 0, widest = 0;
  for (int i = 0; i < count; ++i) {
    elements += weights[i].rows * weights[i].cols;
    widest = std::max(widest, weights[i].cols);
  }
  // If each block may have so many elements there are enough blocks, though a share is of whole
  // rows and each weight's number is rounded up. So the best dealing gives none fewer.
  const int64_t enough = ceil_divide(elements, blocks - count) + widest;
  for (int i = 0; i < count; ++i) dealt[i] = ceil_divide(weights[i].rows, enough / weights[i].cols);
  const auto share = [&](int i) {
    return ceil_divide(weights[i].rows, dealt[i]) * weights[i].cols;
  };
  int64_t left = blocks - std::accumulate(dealt, dealt + count, int64_t{0});
  for (; left > 0; --left) {
    int most = -1;
    for (int i = 0; i < count; ++i)
      if (dealt[i] < weights[i].rows && (most < 0 || share(i) > share(most))) most = i;
    if (most < 0) return;
    ++dealt[most];
  }
}

}  // namespace nf4::cuda
