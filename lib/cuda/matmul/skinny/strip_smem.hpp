// How a strip kernel uses shared memory, which is also what it can run. No CUDA types.
#pragma once

namespace nf4::cuda {

// A CTA has a strip of kStripN rows of the weight and a part of its columns, its warps are
// kStripWarpsN along N by kStripWarpsK along K; a K-tile is kStripK columns.
constexpr int kStripN = 256, kStripK = 64;
constexpr int kStripWarpsN = 4, kStripWarpsK = 4;
constexpr int kStripWarps = kStripWarpsN * kStripWarpsK;
constexpr int kStripThreads = 32 * kStripWarps;
constexpr int kStripWeightBytes = kStripN * kStripK / 2;  // of a stage, before x

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
  smem.stages = max_m > 8 ? 3 : 4;
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
