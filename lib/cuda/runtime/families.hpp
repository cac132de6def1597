// GPU families: the same kernels, compiled once for several architectures. lib/cuda/meson.build
// has the list and makes NF4_GPU_FAMILIES of what this build compiles, best first.
#pragma once

#include "cuda/arch.cuh"
#include "cuda/nf4_gpu_families.hpp"

namespace nf4::cuda {

struct GpuFamily {
  const char *name;
  int archs[8];            // compute capabilities with machine code, such as 75; ends in 0
  int ptx;                 // compute capability of its PTX, which later GPUs compile; 0: none
  bool pdl;                // the kernels call pdl_wait, so they may be launched with PDL
  bool fp16_tensor_cores;  // mma.m16n8k8 of fp16
  bool tensor_cores;       // mma.m16n8k16 of fp16 and bf16, cp.async
  bool tensor_maps;        // they copy with TMA

  // Machine code runs on its own major version from its minor version on.
  constexpr bool runs_on(int compute_capability) const {
    if (ptx != 0 && compute_capability >= ptx) return true;
    for (const int *arch = archs; *arch != 0; ++arch)
      if (compute_capability / 10 == *arch / 10 && compute_capability >= *arch) return true;
    return false;
  }
};

#define NF4_FAMILY_ROW(Arch, ptx, ...)                                                           \
  GpuFamily{                                                                                     \
      Arch::kName,        {__VA_ARGS__},    ptx, Arch::kDependentLaunch, Arch::kFp16TensorCores, \
      Arch::kTensorCores, Arch::kTensorMaps},
inline constexpr GpuFamily kGpuFamilies[] = {NF4_GPU_FAMILIES(NF4_FAMILY_ROW)};
#undef NF4_FAMILY_ROW

// The first that runs on the compute capability, or the one that a test forces; NULL if there is
// none.
const GpuFamily *family_for(int compute_capability);

// Whether the family is the first that runs on the compute capability. Exact kernels (below) run
// only beside that one.
constexpr bool is_best_family(const GpuFamily &family, int compute_capability) {
  for (const GpuFamily &each : kGpuFamilies)
    if (each.runs_on(compute_capability)) return &each == &family;
  return false;
}

// For tests: the family of every later launch; NULL restores the library's choice. Not thread
// safe.
void force_family(const GpuFamily *family);

// An operation's kernels of each family, filled when the library is loaded.
#define NF4_KERNELS_ROW(Arch, ...) Kernels::template make<Arch>(),
template <class Kernels>
const Kernels kKernels[] = {NF4_GPU_FAMILIES(NF4_KERNELS_ROW)};
#undef NF4_KERNELS_ROW

template <class Kernels>
const Kernels &kernels_of(const GpuFamily &family) {
  return kKernels<Kernels>[&family - kGpuFamilies];
}

// Kernels of an architecture's own instructions, compiled for it alone; NULL for another compute
// capability, or where the build has none. They go with the best family, not with a forced one.
#define NF4_EXACT_CASE(Arch, capability)                           \
  if (compute_capability == capability) {                          \
    static const Kernels kernels = Kernels::template make<Arch>(); \
    return &kernels;                                               \
  }
template <class Kernels>
const Kernels *exact_kernels_for([[maybe_unused]] int compute_capability) {
  NF4_EXACT_FAMILIES(NF4_EXACT_CASE)
  return nullptr;
}
#undef NF4_EXACT_CASE

}  // namespace nf4::cuda
