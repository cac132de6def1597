#include "cuda/costs/gpu.hpp"

#include <atomic>
#include <cstring>
#include <mutex>

namespace nf4::cuda {
namespace {

struct NameSlot {
  std::mutex mutex;  // held only while the name is read
  std::atomic<bool> known{false};
  char name[sizeof CostedGpu::name];
  int driver_version;
};
NameSlot slots[kMaxDevices];

bool read_name(int device, NameSlot &slot) {
  cudaDeviceProp properties;
  if (cudaDriverGetVersion(&slot.driver_version) != cudaSuccess ||
      cudaGetDeviceProperties(&properties, device) != cudaSuccess)
    return false;
  static_assert(sizeof slot.name == sizeof properties.name);
  std::memcpy(slot.name, properties.name, sizeof slot.name);
  return true;
}

}  // namespace

bool find_costed_gpu(const LaunchTarget &target, CostedGpu &gpu) {
  const Device &device = target.device;
  NameSlot &slot = slots[device.index];
  if (!slot.known.load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(slot.mutex);
    if (!slot.known.load(std::memory_order_relaxed)) {
      if (!read_name(device.index, slot)) return false;
      slot.known.store(true, std::memory_order_release);
    }
  }
  gpu.compute_capability = device.compute_capability;
  gpu.multiprocessors = device.multiprocessors;
  gpu.shared_bytes = device.shared_bytes;
  gpu.driver_version = slot.driver_version;
  std::strncpy(gpu.kernels, target.family->name, sizeof gpu.kernels - 1);
  gpu.kernels[sizeof gpu.kernels - 1] = '\0';
  std::memcpy(gpu.name, slot.name, sizeof gpu.name);
  return true;
}

}  // namespace nf4::cuda
