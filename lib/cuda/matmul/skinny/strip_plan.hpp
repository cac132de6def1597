// How a weight is divided into strips, and their columns between the CTAs of a cluster. No CUDA
// types.
#pragma once

#include <cstdint>

#include "cuda/matmul/choose.hpp"
#include "cuda/matmul/skinny/strip_smem.hpp"

namespace nf4::cuda {

struct StripPlan {
  int warps_n;
  int64_t strips;
  int cluster;

  int rows() const { return strip_rows(warps_n); }
  // Of the busiest multiprocessor, in rows of all columns.
  double busiest_rows(const GpuFacts &gpu) const {
    const int64_t ctas = ceil_divide(strips * cluster, gpu.multiprocessors);
    return static_cast<double>(ctas * rows()) / cluster;
  }
};

// Clusters that are resident at a time: a cluster's multiprocessors are of one group of 16 or 18,
// one of which has fewer, 12 or more. Two are always neighbours. The driver says more than are.
inline int64_t resident_strips(int cluster, const GpuFacts &gpu) {
  if (cluster == 2) return gpu.multiprocessors / 2;
  return gpu.multiprocessors / 18 * (16 / cluster) + (cluster == 6 ? 2 : 0);
}

// The largest cluster that leaves none waiting and has work for each warp.
inline StripPlan plan_strips(int64_t rows, int64_t cols, int warps_n, const GpuFacts &gpu) {
  StripPlan plan{warps_n, ceil_divide(rows, strip_rows(warps_n)), 1};
  for (int cluster = 2; cluster <= kMaxClusterSize; ++cluster)
    if (plan.strips <= resident_strips(cluster, gpu) &&
        cluster * strip_warps_k(warps_n) <= cols / kStripK)
      plan.cluster = cluster;
  return plan;
}

// Of equal ones the wide, which take fewer copies, unless they need a cluster and the narrow do
// not.
inline StripPlan plan_strips(nf4_int4_layout layout, int64_t rows, int64_t cols,
                             const GpuFacts &gpu) {
  const StripPlan narrow = plan_strips(rows, cols, narrow_strip(layout), gpu);
  const StripPlan wide = plan_strips(rows, cols, wide_strip(layout), gpu);
  const double narrow_rows = narrow.busiest_rows(gpu), wide_rows = wide.busiest_rows(gpu);
  if (narrow_rows != wide_rows) return narrow_rows < wide_rows ? narrow : wide;
  return narrow.cluster == 1 && wide.cluster > 1 ? narrow : wide;
}

}  // namespace nf4::cuda
