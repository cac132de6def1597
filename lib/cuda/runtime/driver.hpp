// Functions of the CUDA driver, which is found at run time: nothing links against it.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace nf4::cuda {

// One function, since a version of CUDA. A failure is not remembered: a driver may come to life
// later.
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

  // Calls it. The numbers of the driver's errors are those of the runtime.
  template <class... Args>
  cudaError_t call(Args... args) {
    Function function;
    const cudaError_t error = find(function);
    return error != cudaSuccess ? error : static_cast<cudaError_t>(function(args...));
  }

 private:
  const char *const name_;
  const unsigned version_;
  std::atomic<Function> known_{nullptr};
};

}  // namespace nf4::cuda
