// Which products the strip kernels take, and how they use shared memory. No CUDA types.
#pragma once

#include "nf4/nf4.h"

namespace nf4::cuda {

// A CTA has a strip of kStripN rows of the weight and a part of its columns, its warps are
// kStripWarpsN along N by kStripWarpsK along K; a K-tile is kStripK columns.
constexpr int kStripWarpsN = 2, kStripWarpsK = 8;
constexpr int kStripN = 64 * kStripWarpsN, kStripK = 64;
constexpr int kStripWarps = kStripWarpsN * kStripWarpsK;
constexpr int kStripThreads = 32 * kStripWarps;
constexpr int kStripWeightBytes = kStripN * kStripK / 2;  // of a stage, before x

// Where words lie along the rows of the weight. Up to 8 rows of x with GPTQ's layout are faster in
// the other skinny kernels.
constexpr bool takes_strips(nf4_int4_layout layout, int max_m, bool tensor_maps) {
  return layout == NF4_INT4_AWQ || (layout == NF4_INT4_GPTQ && max_m > 8 && tensor_maps);
}

// Offsets in shared memory, of the kernel for up to max_m rows of x: the stages of each of
// kStripWarpsK pipelines, their mbarriers, the sums of each pipeline's warps, and those that other
// CTAs of the cluster send.
struct StripSmem {
  int stages;
  int stage_bytes;
  int barriers;
  int partials;
  int partials_of;  // floats, of a pipeline
  int received;
  int bytes;
};
constexpr StripSmem strip_smem(int max_m) {
  StripSmem smem{};
  smem.stages = 3;  // more are slower
  smem.stage_bytes = kStripWeightBytes + max_m * kStripK * 2;
  smem.barriers = kStripWarpsK * smem.stages * smem.stage_bytes;
  smem.partials = smem.barriers + kStripWarpsK * smem.stages * 16;
  smem.partials_of = kStripN * max_m + kStripN / 8 * 8;
  smem.received = smem.partials + kStripWarpsK * smem.partials_of * 4;
  // A CTA's share is rounded up to whole rows.
  smem.bytes = smem.received + (kStripN + 8) * max_m * 4;
  return smem;
}

}  // namespace nf4::cuda
