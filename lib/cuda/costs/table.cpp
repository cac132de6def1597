#include "cuda/costs/table.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <shared_mutex>

#include "cuda/backend.hpp"
#include "cuda/costs/built_in.hpp"
#include "cuda/matmul/multistage/tile.hpp"

namespace nf4::cuda {
namespace {

// Costs that are set need no memory of the system's: a text is parsed into the table that is not in
// use.
CostTable tables[2];
int current_table = 0;
std::atomic<bool> present{false};
std::shared_mutex table_mutex;  // readers look up costs, which takes less than a microsecond
std::mutex set_mutex;           // guards the table that is not in use

bool is_same(const CostedGpu &a, const CostedGpu &b) {
  return a.compute_capability == b.compute_capability && a.multiprocessors == b.multiprocessors &&
         a.shared_bytes == b.shared_bytes && a.driver_version == b.driver_version &&
         std::strcmp(a.kernels, b.kernels) == 0 && std::strcmp(a.name, b.name) == 0;
}

// The rows of x that a kernel multiplies: whole CTA tiles.
double multiplied_rows(int strategy, int64_t m) {
  int64_t tile = 1;
  if (strategy == static_cast<int>(MatmulKernel::kMma)) tile = kMatmulConfigs[kMma64x64].tile_m;
  const int64_t few = kMatmulConfigs[kSkinny8].tile_m;
  if (strategy == static_cast<int>(MatmulKernel::kSkinny) && m > kMatmulConfigs[kSkinny2].tile_m)
    tile = few;
  // Up to so few rows a product has no workspace, so that CTAs share no tiles.
  if (strategy == static_cast<int>(MatmulKernel::kMultistage) && m > few)
    tile = kMatmulConfigs[multistage_config(m)].tile_m;
  return static_cast<double>(ceil_divide(m, tile)) * static_cast<double>(tile);
}

double time_of(const CostRow &row, const CostedSize &size) {
  const double rows = static_cast<double>(size.rows) / 1000;
  const double cols = static_cast<double>(size.cols) / 1000;
  return double{row.start} + double{row.weights} * rows * cols + double{row.rows} * rows +
         double{row.columns} * cols;
}

// Between two rows the time is linear in m, and beyond the last it is proportional to m. Below the
// first it is not known.
double find_time(const CostTable &table, int32_t group, int strategy, const CostedSize &size) {
  const auto less = [](const CostRow &row, int32_t key) { return row.group < key; };
  const CostRow *const end = table.rows + table.row_count;
  const CostRow *const first = std::lower_bound(table.rows, end, group, less);
  const CostRow *const last = std::lower_bound(first, end, group + 1, less);
  if (first == last) return -1;
  const double m = multiplied_rows(strategy, size.m);
  const CostRow *next = first;
  while (next != last && next->m < m) ++next;
  if (next == first) return next->m == m ? time_of(*next, size) : -1;
  const double before = time_of(next[-1], size);
  if (next == last) return before * m / next[-1].m;
  const double part = (m - next[-1].m) / (next->m - next[-1].m);
  return before + part * (time_of(*next, size) - before);
}

// The place of a GPU among those of the table, or -1.
int find_gpu(const CostTable &table, const CostedGpu &gpu) {
  for (int i = 0; i < table.gpu_count; ++i)
    if (is_same(table.gpus[i], gpu)) return i;
  return -1;
}

// Built-in costs are for any driver.
CostedGpu any_driver(CostedGpu gpu) {
  gpu.driver_version = 0;
  return gpu;
}

}  // namespace

nf4_status set_costs(const char *text, size_t bytes) {
  const std::lock_guard<std::mutex> setting(set_mutex);
  CostTable &other = tables[1 - current_table];
  other.gpu_count = other.row_count = 0;
  if (text != nullptr)
    if (const nf4_status status = parse_costs(text, bytes, other)) return status;
  const std::unique_lock<std::shared_mutex> replacing(table_mutex);
  current_table = 1 - current_table;
  present.store(other.row_count > 0, std::memory_order_release);
  return NF4_STATUS_OK;
}

bool have_costs() { return have_built_in_costs() || present.load(std::memory_order_acquire); }

bool find_times_in(const CostTable &table, const CostedGpu &gpu, const CostedSize &size,
                   StrategyTimes &times) {
  const int found = find_gpu(table, gpu);
  if (found < 0) return false;
  for (int strategy = 0; strategy < kStrategyCount; ++strategy)
    times.us[strategy] =
        find_time(table, cost_group(found, size.product, size.dtype, strategy), strategy, size);
  return true;
}

StrategyTimes find_times(const CostedGpu &gpu, const CostedSize &size) {
  StrategyTimes times;
  {
    const std::shared_lock<std::shared_mutex> reading(table_mutex);
    if (find_times_in(tables[current_table], gpu, size, times)) return times;
  }
  if (have_built_in_costs()) find_times_in(built_in_costs(), any_driver(gpu), size, times);
  return times;
}

bool have_built_in_costs_of(const CostedGpu &gpu) {
  return have_built_in_costs() && find_gpu(built_in_costs(), any_driver(gpu)) >= 0;
}

}  // namespace nf4::cuda
