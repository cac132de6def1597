// The products that the strip kernels take, and how they use shared memory. No CUDA types.
#pragma once

#include "nf4/nf4.h"

namespace nf4::cuda {

// A CTA has a strip of kStripWarpRows rows of the weight for each of its warps along N, and a part
// of its columns, which its other warps share; a K-tile is kStripK columns.
constexpr int kStripWarps = 16;
constexpr int kStripThreads = 32 * kStripWarps;
constexpr int kStripWarpRows = 64;
constexpr int kStripK = 64;
constexpr int strip_rows(int warps_n) { return kStripWarpRows * warps_n; }
constexpr int strip_warps_k(int warps_n) { return kStripWarps / warps_n; }

// The warps along N of a layout's kernels for narrow and for wide strips. A word of AWQ has 8 rows,
// so the rows of its boxes are short: 64 or 128 bytes.
constexpr int narrow_strip(nf4_int4_layout layout) { return layout == NF4_INT4_AWQ ? 2 : 1; }
constexpr int wide_strip(nf4_int4_layout layout) { return narrow_strip(layout) * 2; }

// Whether the skinny kernel of a layout, for up to max_m rows of x, is a strip kernel. AWQ has no
// other. GPTQ has both: strips need TMA, and with up to 2 rows of x the warp tiles of
// int4_kernel.cuh are faster if the weight has many rows.
constexpr bool takes_strips(nf4_int4_layout layout, int max_m, bool tensor_maps) {
  return layout == NF4_INT4_AWQ || (layout == NF4_INT4_GPTQ && max_m > 2 && tensor_maps);
}

// Offsets in shared memory, of the kernel for up to max_m rows of x: the stages of each pipeline,
// their mbarriers, and the sums that other CTAs of the cluster send. At the end the sums of the
// CTA's own warps take the place of the stages.
struct StripSmem {
  int stages;
  int weight_bytes;  // bytes of a stage before x
  int stage_bytes;
  int barriers;
  int partials_of;  // floats, of a pipeline
  int received;
  int bytes;
};
constexpr StripSmem strip_smem(int warps_n, int max_m) {
  const int rows = strip_rows(warps_n), pipelines = strip_warps_k(warps_n);
  StripSmem smem{};
  smem.stages = warps_n == 1 && max_m > 8 ? 2 : 3;  // more are slower
  smem.weight_bytes = rows * kStripK / 2;
  smem.stage_bytes = smem.weight_bytes + max_m * kStripK * 2;
  smem.barriers = pipelines * smem.stages * smem.stage_bytes;
  smem.partials_of = rows * max_m + rows / 8 * 8;
  smem.received = smem.barriers + pipelines * smem.stages * 16;
  // A CTA's share is rounded up to whole rows.
  smem.bytes = smem.received + (rows + 8) * max_m * 4;
  return smem;
}

}  // namespace nf4::cuda
