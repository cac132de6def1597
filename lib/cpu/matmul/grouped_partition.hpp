// Splits the products of experts over threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/matmul/partition.hpp"
#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

inline int64_t tile_columns(const GroupedProblem &problem, int threads) {
  constexpr int64_t kOfGradient = 128;
  return problem.gradient ? kOfGradient : tile_rows(problem.expert_rows(), threads, 16, 32);
}
inline int64_t tile_columns(const Int4GroupedProblem &problem, int threads) {
  return tile_rows(problem.weight, threads);
}

// Tiles of the columns of y, expert by expert: rows of the weight, or columns in the gradient. A
// tile has a unit of work for each row of y of its expert, so experts without rows have none.
template <class W>
class GroupedPartition {
 public:
  GroupedPartition(const GroupedProblemOf<W> &problem, int threads)
      : problem_(problem),
        columns_(problem.y_columns()),
        tile_(tile_columns(problem, threads)),
        tiles_(ceil_divide(columns_, tile_)) {}

  int64_t units() const {
    int64_t rows = 0;
    for (int32_t e = 0; e < problem_.experts; ++e) rows = end_of(e, rows);
    return rows * tiles_;
  }
  int64_t units_per_thread() const {
    const int64_t products = tile_ * std::max<int64_t>(1, problem_.x_columns());
    return std::max<int64_t>(1, Partition<MatmulProblem>::kProductsPerThread / products);
  }

  // Calls matmul(expert, rows of y, columns of y) for the tiles whose first unit is in
  // [begin, end).
  template <class Matmul>
  void for_each(int64_t begin, int64_t end, Matmul matmul) const {
    RowRange m{0, 0};
    for (int32_t e = 0; e < problem_.experts && m.end * tiles_ < end; ++e) {
      m = {m.end, end_of(e, m.end)};
      if (m.begin == m.end) continue;
      const int64_t first = tile_at(begin, m), last = tile_at(end, m);
      if (first < last) matmul(e, m, RowRange{first * tile_, std::min(columns_, last * tile_)});
    }
  }

 private:
  // The end of the rows of expert e, which begin with `begin`.
  int64_t end_of(int32_t e, int64_t begin) const {
    return std::min(problem_.m, std::max<int64_t>(begin, problem_.ends[e]));
  }
  // The first tile, at a unit or after it, of the expert with the rows m of y.
  int64_t tile_at(int64_t unit, RowRange m) const {
    const int64_t units = std::clamp(unit, m.begin * tiles_, m.end * tiles_) - m.begin * tiles_;
    return ceil_divide(units, m.end - m.begin);
  }

  const GroupedProblemOf<W> &problem_;
  int64_t columns_;
  int64_t tile_;
  int64_t tiles_;
};

}  // namespace nf4::cpu
