// How long a strategy takes for a product on a GPU, in rows of a table: the costs that the caller
// set (nf4_set_costs) or, for a GPU that these do not name, the built-in costs. Plain C++, compiled
// without CUDA too. docs/design/tuning.md explains it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/matmul/configs.hpp"
#include "cuda/weight/transposed.hpp"
#include "problem.hpp"

namespace nf4::cuda {

// The products that costs tell apart. Experts have none.
enum class CostedProduct : uint8_t {
  kCodebook,
  kCodebookLora,
  kGradient,
  kGradientLora,
  kGptq,
  kAwq,
  kCompressedTensors,
  kCount
};

// The strategies are the kinds of kernel (MatmulKernel), and the dense way.
constexpr int kDenseStrategy = 4;
constexpr int kStrategyCount = 5;
constexpr int strategy_of(int config) { return static_cast<int>(kMatmulConfigs[config].kernel); }

// A GPU, and the kernels that it runs. Costs are of one of them.
struct CostedGpu {
  int64_t compute_capability;
  int64_t multiprocessors;
  int64_t shared_bytes;
  int64_t driver_version;
  char kernels[32];  // the family
  char name[256];
};

// The costs of a product depend on these, beside the GPU.
struct CostedSize {
  CostedProduct product;
  nf4_dtype dtype;
  int64_t m;
  int64_t rows;  // the stored weight's
  int64_t cols;
};

// Estimated times by strategy, in microseconds; negative where no cost is known.
struct StrategyTimes {
  double us[kStrategyCount] = {-1, -1, -1, -1, -1};

  bool knows(int strategy) const { return us[strategy] >= 0; }
};

// Whether any costs are set. Launches ask this first.
bool have_costs();

StrategyTimes find_times(const CostedGpu &gpu, const CostedSize &size);

// Whether the library itself has costs of this GPU, with any driver.
bool have_built_in_costs_of(const CostedGpu &gpu);

// ---- What a kind of weight answers (lib/cuda/kinds) ----------------------------------------

// Fills in the size of a product that costs are for. Returns false for others, such as fp32, small
// blocks, and integers that are slow to dequantize.
bool find_costed_size(const MatmulProblem &problem, CostedSize &size);
bool find_costed_size(const GradProblem &problem, CostedSize &size);
bool find_costed_size(const Int4MatmulProblem &problem, CostedSize &size);

}  // namespace nf4::cuda
