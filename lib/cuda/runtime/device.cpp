#include "cuda/runtime/device.hpp"

#include <cuda.h>

#include <algorithm>
#include <mutex>

#include "cuda/runtime/driver.hpp"
#include "nf4_config.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

// The cap of a build with -Dshared_memory, which runs what GPUs with less shared memory run; in
// other builds 0.
constexpr int kMostSharedBytes = NF4_SHARED_MEMORY << 10;

DriverFunction<decltype(&cuCtxGetId)> get_context_id("cuCtxGetId", 12000);

// A number that no other context of this process ever has; 0 if none is current.
uint64_t current_context() {
  unsigned long long id = 0;
  return get_context_id.call(nullptr, &id) == cudaSuccess ? id : 0;
}

struct DeviceSlot {
  std::mutex mutex;  // held only while the facts are read
  std::atomic<bool> known{false};
  Device device;
};
DeviceSlot slots[kMaxDevices];

cudaError_t read_device(int index, Device &device) {
  int major = 0, minor = 0, multiprocessors = 0, shared = 0, pageable = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  if (kMostSharedBytes > 0) shared = std::min(shared, kMostSharedBytes);
  device = {index, major * 10 + minor, multiprocessors, shared, pageable != 0};
  return error;
}

}  // namespace

nf4_status cached_device(int index, Device &device) {
  if (index >= kMaxDevices)
    return fail(NF4_STATUS_UNSUPPORTED_DEVICE, "device %d; this library knows up to %d", index,
                kMaxDevices);
  DeviceSlot &slot = slots[index];
  if (!slot.known.load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(slot.mutex);
    Device facts;
    // Only a success is remembered: a driver may come to life later.
    const cudaError_t error = read_device(index, facts);
    if (error != cudaSuccess) return fail_cuda(error, "cudaDeviceGetAttribute");
    if (!slot.known.load(std::memory_order_relaxed)) slot.device = facts;
    slot.known.store(true, std::memory_order_release);
  }
  device = slot.device;
  return NF4_STATUS_OK;
}

nf4_status check_device(int index, int &count) {
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return fail_cuda(error, "cudaGetDeviceCount");
  if (index >= 0 && index < count) return NF4_STATUS_OK;
  return fail(NF4_STATUS_INVALID_ARGUMENT, "device is %d; there are %d", index, count);
}

nf4_status fail_cuda(cudaError_t error, const char *call) {
  nf4_status status = NF4_STATUS_CUDA_ERROR;
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
      error == cudaErrorStubLibrary || error == cudaErrorSystemDriverMismatch)
    status = NF4_STATUS_NO_DEVICE;
  int driver = 0;
  if (status == NF4_STATUS_NO_DEVICE && cudaDriverGetVersion(&driver) == cudaSuccess) {
    if (driver == 0) return fail(status, "no CUDA driver is installed");
    if (driver / 1000 < CUDART_VERSION / 1000)
      return fail(status,
                  "the CUDA driver is for CUDA %d.%d; this libnf4 needs one for CUDA %d.0 or later",
                  driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000);
  }
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion)
    status = NF4_STATUS_UNSUPPORTED_DEVICE;
  return fail(status, "%s: %s (%s)", call, cudaGetErrorString(error), cudaGetErrorName(error));
}

nf4_status no_family(const Device &device) {
  return fail(NF4_STATUS_UNSUPPORTED_DEVICE,
              "device %d has compute capability %d.%d, for which this libnf4 has no kernel",
              device.index, device.compute_capability / 10, device.compute_capability % 10);
}

bool ContextFlag::has(int device) const {
  const uint64_t context = current_context();
  return context != 0 && contexts_[device].load(std::memory_order_acquire) == context;
}

void ContextFlag::set(int device) {
  contexts_[device].store(current_context(), std::memory_order_release);
}

CurrentDevice::CurrentDevice(int device) {
  error_ = cudaGetDevice(&previous_);
  if (error_ != cudaSuccess || previous_ == device) return;
  error_ = cudaSetDevice(device);
  switched_ = error_ == cudaSuccess;
}

nf4_status CurrentDevice::status() const {
  return error_ == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error_, "cudaSetDevice");
}

CurrentDevice::~CurrentDevice() {
  if (switched_) cudaSetDevice(previous_);
}

}  // namespace nf4::cuda
