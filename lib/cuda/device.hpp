// The device behind a stream, what the library knows of it, and CUDA errors as statuses.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "nf4/nf4.h"
#include "problem.hpp"

namespace nf4::cuda {

// The status and detail of a CUDA call that failed. The error stays with the runtime.
nf4_status fail_cuda(cudaError_t error, const char *call);

constexpr int kMaxDevices = 64;

struct Device {
  int index;               // below kMaxDevices
  int compute_capability;  // major * 10 + minor
  int multiprocessors;
  int shared_bytes;          // that a thread block may have
  bool reaches_host_memory;  // pageable memory, through the system's page tables
};

// The device that the operands are memory of, or that of the stream if all of them are
// managed or host memory; a failure if they are of different devices, out of its reach, or
// not of the stream's device. A stream cannot be asked for its device while it is being
// captured, nor a default stream at all: then the memory alone decides, or the current
// device.
nf4_status locate(const Operands &operands, cudaStream_t stream, Device &device);

// The same for the operands of several products, which a failure counts from 0.
nf4_status locate(const Operands *const *products, int count, cudaStream_t stream, Device &device);

// Says that this build has no kernel for the device.
nf4_status no_family(const Device &device);

// Makes a device current and, at the end, the one that was. Costs nothing when they are
// the same.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice &) = delete;
  CurrentDevice &operator=(const CurrentDevice &) = delete;
  cudaError_t error() const { return error_; }

 private:
  int previous_ = 0;
  bool switched_ = false;
  cudaError_t error_;
};

inline bool is_multiple(const void *address, int alignment) {
  return reinterpret_cast<uintptr_t>(address) % alignment == 0;
}

// Are rows of x, of numbers of 16 bits, on 16-byte boundaries?
inline bool has_x_vectors(const MatmulProblem &problem) {
  return is_multiple(problem.x, 16) && (problem.m == 1 || problem.x_stride % 8 == 0);
}

// What has been set in a device's context, as kernels' attributes are: a device gets another
// context where it is reset, or where a program makes one of its own.
class SetInContext {
 public:
  // In the current one of the device?
  bool has(int device) const;
  void set(int device);

 private:
  std::atomic<uint64_t> contexts_[kMaxDevices] = {};
};

// Loads kernels before their first launch; NULL entries are passed over. The device is
// current.
cudaError_t load_kernels(const void *const *kernels, int count);

struct Launch {
  const void *kernel;
  int64_t blocks;
  int threads;
  bool waits;  // the kernel waits for its predecessor, so it may start while that one ends
  cudaStream_t stream;
  int shared_bytes = 0;  // dynamic
  int cluster = 1;       // so many blocks reach each other's shared memory
};

// For tests and benchmarks: no kernel starts before its predecessor has ended. Not thread
// safe.
void force_plain_launches(bool plain);

namespace detail {
cudaError_t launch(const Launch &launch, const void *args);
}

// Enqueues a kernel of one argument struct. The stream's device is current.
template <class Args>
cudaError_t launch(const Launch &launch, const Args &args) {
  return detail::launch(launch, &args);
}

}  // namespace nf4::cuda
