// Splits the matmuls of one call over threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/ranges.hpp"
#include "problem.hpp"

namespace nf4::cpu {

// The rows of a tile: a whole multiple of a kernel's rows that gives each thread some tiles.
inline int64_t tile_rows(int64_t rows, int threads, int64_t of_kernel, int64_t most,
                         int64_t tiles_per_thread = 8) {
  const int64_t wanted = rows / (tiles_per_thread * threads);
  return std::clamp(wanted / of_kernel * of_kernel, of_kernel, most);
}

// The rows of a tile. Lanes take 32 at once, and a vector of AWQ words has 128. Rows of words are
// far apart, so longer parts of them are read better.
inline int64_t tile_rows(const Weight &weight, int threads) {
  return tile_rows(weight.rows, threads, 16, 32);
}
inline int64_t tile_rows(const Int4Weight &weight, int threads) {
  const bool in_rows = weight.layout == NF4_INT4_COMPRESSED_TENSORS;
  return in_rows ? tile_rows(weight.rows, threads, 16, 32)
                 : tile_rows(weight.rows, threads, 128, 2048, 4);
}

// The rows of the weights of several matmuls, one after another, in tiles of rows. They form a
// range of units of work that is split over threads; a tile of a large matmul has more units than a
// tile of a small one.
template <class Problem>
class Partition {
 public:
  // A thread is not worth starting for fewer multiplications: about 50 microseconds of a vector
  // variant.
  static constexpr int64_t kProductsPerThread = 1 << 20;

  Partition(const Problem *problems, int count, int threads)
      : problems_(problems), count_(count), threads_(threads) {
    double all = 0, least = INFINITY;
    for (int i = 0; i < count; ++i) {
      if (problems[i].empty()) continue;
      all += work_of_tile(problems[i]) * static_cast<double>(tiles_of(problems[i]));
      least = std::min(least, work_of_tile(problems[i]));
    }
    // Units are not so fine that their number exceeds 64 bits.
    work_of_unit_ = std::max(least, all * 0x1p-50);
    for (int i = 0; i < count; ++i) {
      const Problem &problem = problems[i];
      Part &part = parts_[i];
      part.first = i == 0 ? 0 : parts_[i - 1].last;
      part.units_of_tile = std::max<int64_t>(
          1, problem.empty() ? 1 : static_cast<int64_t>(work_of_tile(problem) / work_of_unit_));
      part.last = part.first + tiles_of(problem) * part.units_of_tile;
    }
  }

  int64_t units() const { return parts_[count_ - 1].last; }
  int64_t units_per_thread() const {
    return std::max<int64_t>(1, static_cast<int64_t>(kProductsPerThread / work_of_unit_));
  }

  // Calls matmul(i, rows) for the tiles of problem i whose first unit is in [begin, end).
  template <class Matmul>
  void for_each(int64_t begin, int64_t end, Matmul matmul) const {
    for (int i = 0; i < count_ && parts_[i].first < end; ++i) {
      const int64_t first = parts_[i].tile_at(begin), last = parts_[i].tile_at(end);
      if (first == last) continue;
      const int64_t rows = problems_[i].weight.rows,
                    tile = tile_rows(problems_[i].weight, threads_);
      matmul(i, RowRange{first * tile, std::min(rows, last * tile)});
    }
  }

 private:
  struct Part {
    int64_t first, last;  // units of the problem
    int64_t units_of_tile;

    // The first tile that begins at a unit or after it.
    int64_t tile_at(int64_t unit) const {
      return ceil_divide(std::clamp(unit, first, last) - first, units_of_tile);
    }
  };

  int64_t tiles_of(const Problem &problem) const {
    return problem.empty() ? 0
                           : ceil_divide(problem.weight.rows, tile_rows(problem.weight, threads_));
  }
  // The multiplications of a tile; without columns, its stores.
  double work_of_tile(const Problem &problem) const {
    return static_cast<double>(problem.m) * std::max<int64_t>(1, problem.weight.cols) *
           tile_rows(problem.weight, threads_);
  }

  const Problem *problems_;
  int count_;
  int threads_;
  double work_of_unit_;
  Part parts_[NF4_MATMUL_BATCH_MAX];
};

}  // namespace nf4::cpu
