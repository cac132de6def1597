// The device behind a stream, what the library knows of it, and CUDA errors as statuses.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "nf4/nf4.h"
#include "problem.hpp"

namespace nf4::cuda {

// The status and detail of a CUDA call that failed. The error stays with the runtime.
nf4_status fail_cuda(cudaError_t error, const char *call);

struct Device {
  int index;
  int compute_capability;    // major * 10 + minor
  bool reaches_host_memory;  // pageable memory, through the system's page tables
};

// The device that the operands are memory of, or that of the stream if all of them are
// managed or host memory; a failure if they are of different devices, out of its reach, or
// not of the stream's device. A stream cannot be asked for its device while it is being
// captured, nor a default stream at all: then the memory alone decides, or the current
// device.
nf4_status locate(const Operands &operands, cudaStream_t stream, Device &device);

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

// Loads kernels before their first launch; NULL entries are passed over. The device is
// current.
cudaError_t load_kernels(const void *const *kernels, int count);

// Enqueues a kernel of one argument struct on `stream`, whose device is current.
template <class Args>
cudaError_t launch(const void *kernel, int64_t blocks, int threads, const Args &args,
                   cudaStream_t stream) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;  // more than any memory holds
  void *parameters[] = {const_cast<Args *>(&args)};
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)),
                          dim3(static_cast<unsigned>(threads)), parameters, 0, stream);
}

}  // namespace nf4::cuda
