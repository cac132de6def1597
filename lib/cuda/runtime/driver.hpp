// Functions of the CUDA driver, which is found at run time: nothing links against it.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace nf4::cuda {

// One function. A failure is not remembered: a driver may come to life later.
template <class Function>
class DriverFunction {
 public:
  constexpr DriverFunction(const char *name, unsigned version) : name_(name), version_(version) {}

  cudaError_t find(Function &function) {
    function = known_.load(std::memory_order_relaxed);
    if (function != nullptr) return cudaSuccess;
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name_, &found, version_, cudaEnableDefault, &result);
    if (error != cudaSuccess) return error;
    if (found == nullptr) return cudaErrorSymbolNotFound;
    function = reinterpret_cast<Function>(found);
    known_.store(function, std::memory_order_relaxed);
    return cudaSuccess;
  }

 private:
  const char *const name_;
  const unsigned version_;
  std::atomic<Function> known_{nullptr};
};

}  // namespace nf4::cuda
