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
  // Returns the work of the busiest multiprocessor, in whole rows of the weight.
  double busiest_rows(const GpuFacts &gpu) const {
    const int64_t ctas = ceil_divide(strips * cluster, gpu.multiprocessors);
    return static_cast<double>(ctas * rows()) / cluster;
  }
};

// Returns how many clusters are resident at a time. The multiprocessors of a cluster belong to one
// group of 16 or 18; one group has fewer, 12 or more. Two multiprocessors are always neighbours.
// The driver reports more clusters than are resident.
inline int64_t resident_strips(int cluster, const GpuFacts &gpu) {
  if (cluster == 2) return gpu.multiprocessors / 2;
  return gpu.multiprocessors / 18 * (16 / cluster) + (cluster == 6 ? 2 : 0);
}

// Chooses the largest cluster size with which no cluster waits and each warp has work.
inline StripPlan plan_strips(int64_t rows, int64_t cols, int warps_n, const GpuFacts &gpu) {
  StripPlan plan{warps_n, ceil_divide(rows, strip_rows(warps_n)), 1};
  for (int cluster = 2; cluster <= kMaxClusterSize; ++cluster)
    if (plan.strips <= resident_strips(cluster, gpu) &&
        cluster * strip_warps_k(warps_n) <= cols / kStripK)
      plan.cluster = cluster;
  return plan;
}

// Chooses the strips that give the busiest multiprocessor less work. If both give the same, it
// chooses the wide ones, which take fewer copies, unless only they need a cluster.
inline StripPlan plan_strips(nf4_int4_layout layout, int64_t rows, int64_t cols,
                             const GpuFacts &gpu) {
  const StripPlan narrow = plan_strips(rows, cols, narrow_strip(layout), gpu);
  const StripPlan wide = plan_strips(rows, cols, wide_strip(layout), gpu);
  const double narrow_rows = narrow.busiest_rows(gpu), wide_rows = wide.busiest_rows(gpu);
  if (narrow_rows != wide_rows) return narrow_rows < wide_rows ? narrow : wide;
  return narrow.cluster == 1 && wide.cluster > 1 ? narrow : wide;
}

}  // namespace nf4::cuda
