// The table of costs, and the parser that fills it.
#pragma once

#include "cuda/costs/costs.hpp"

namespace nf4::cuda {

// The time of a strategy for a number of rows of x, in microseconds: start + weights * N * K / 10^6
// + rows * N / 10^3 + columns * K / 10^3.
struct CostRow {
  int32_t group;  // cost_group(): rows of one group differ in m alone
  int32_t m;
  float start;
  float weights;
  float rows;
  float columns;
};

constexpr int kMaxCostedGpus = 8;
constexpr int kMaxCostRows = 4096;
struct CostTable {
  CostedGpu gpus[kMaxCostedGpus];
  int gpu_count;
  CostRow rows[kMaxCostRows];  // in ascending order of group and m
  int row_count;
};

constexpr int32_t cost_group(int gpu, CostedProduct product, nf4_dtype dtype, int strategy) {
  const int of_gpu = gpu * static_cast<int>(CostedProduct::kCount) + static_cast<int>(product);
  return (of_gpu * 2 + (dtype == NF4_DTYPE_BF16)) * kStrategyCount + strategy;
}

// Fills in the times of a GPU that the table has costs of. Returns false for others.
bool find_times_in(const CostTable &table, const CostedGpu &gpu, const CostedSize &size,
                   StrategyTimes &times);

// Fills the table in. It is unspecified if the text is refused.
nf4_status parse_costs(const char *text, size_t bytes, CostTable &table);

}  // namespace nf4::cuda
