// The GPU architectures, as far as they differ for kernels: one struct each. It is the template
// argument of every kernel that uses more than the baseline.
#pragma once

namespace nf4::cuda {

// The baseline, which runs everywhere from Turing on; later GPUs run it through its PTX.
struct Sm75 {
  static constexpr const char *kName = "sm75";
  static constexpr bool kCachePolicies = false;    // createpolicy and .L2::cache_hint
  static constexpr bool kBulkPrefetch = false;     // cp.async.bulk.prefetch
  static constexpr bool kDependentLaunch = false;  // griddepcontrol
  static constexpr bool kFp16TensorCores = true;   // mma.m16n8k8 of fp16
  static constexpr bool kTensorCores = false;      // mma.m16n8k16 of fp16 and of bf16, cp.async
  static constexpr bool kTensorMaps = false;       // cp.async.bulk.tensor
  static constexpr bool kClusters = false;         // barrier.cluster, distributed shared memory
};

struct Sm80 {
  static constexpr const char *kName = "sm80";
  static constexpr bool kCachePolicies = true;
  static constexpr bool kBulkPrefetch = false;
  static constexpr bool kDependentLaunch = false;
  static constexpr bool kFp16TensorCores = true;
  static constexpr bool kTensorCores = true;
  static constexpr bool kTensorMaps = false;
  static constexpr bool kClusters = false;
};

struct Sm90 {
  static constexpr const char *kName = "sm90";
  static constexpr bool kCachePolicies = true;
  static constexpr bool kBulkPrefetch = true;
  static constexpr bool kDependentLaunch = true;
  static constexpr bool kFp16TensorCores = true;
  static constexpr bool kTensorCores = true;
  static constexpr bool kTensorMaps = true;
  static constexpr bool kClusters = true;
};

// Adds the instructions that only Hopper has, such as wgmma. An exact family.
struct Sm90a : Sm90 {
  static constexpr const char *kName = "sm90a";
};

// The threads that a multiprocessor holds, for __launch_bounds__ (CUDA C++ Programming Guide,
// technical specifications per compute capability).
#if !defined(__CUDA_ARCH__)
constexpr int kThreadsPerMultiprocessor = 2048;
#elif __CUDA_ARCH__ < 800
constexpr int kThreadsPerMultiprocessor = 1024;
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kThreadsPerMultiprocessor = 1536;
#else
constexpr int kThreadsPerMultiprocessor = 2048;
#endif

// The number of CTAs for __launch_bounds__ that together have resident_threads threads, or as many
// as a multiprocessor holds.
constexpr int resident_ctas(int resident_threads, int threads_of_block) {
  return (resident_threads < kThreadsPerMultiprocessor ? resident_threads
                                                       : kThreadsPerMultiprocessor) /
         threads_of_block;
}

}  // namespace nf4::cuda
