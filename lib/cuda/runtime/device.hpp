// Devices: what the library knows of each, the current one, and CUDA errors as statuses.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "nf4/nf4.h"

namespace nf4::cuda {

// The status and detail of a CUDA call that failed. The error stays with the runtime.
nf4_status fail_cuda(cudaError_t error, const char *call);

constexpr int kMaxDevices = 64;

struct Device {
  int index;               // below kMaxDevices
  int compute_capability;  // major * 10 + minor
  int multiprocessors;
  int shared_bytes;          // shared memory that a CTA may have
  bool reaches_host_memory;  // pageable memory, through the system's page tables
};

// Reads the device's properties on the first call, and remembers them.
nf4_status cached_device(int index, Device &device);

// Refuses an index of no GPU; fills in how many there are.
nf4_status check_device(int index, int &count);

// Says that this build has no kernel for the device.
nf4_status no_family(const Device &device);

// Makes a device current, and restores the previous one at the end. Costs nothing when they are
// the same.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice &) = delete;
  CurrentDevice &operator=(const CurrentDevice &) = delete;
  cudaError_t error() const { return error_; }
  nf4_status status() const;

 private:
  int previous_ = 0;
  bool switched_ = false;
  cudaError_t error_;
};

// A flag for each device that is lost with the device's context, as kernel attributes are: a
// device gets another context when it is reset, or when a program creates its own.
class ContextFlag {
 public:
  // Reads and sets the flag of the device's current context.
  bool has(int device) const;
  void set(int device);

 private:
  std::atomic<uint64_t> contexts_[kMaxDevices] = {};
};

}  // namespace nf4::cuda
