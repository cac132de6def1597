// Reports facts about a device and loads its kernels. This is the one file that knows every
// operation.
#include <cstring>

#include "cuda/backend.hpp"
#include "cuda/costs/built_in.hpp"
#include "cuda/costs/gpu.hpp"
#include "cuda/dequant/int4_kernels.hpp"
#include "cuda/dequant/kernels.hpp"
#include "cuda/lora/grad_kernels.hpp"
#include "cuda/matmul/matmul.hpp"
#include "cuda/matmul/target.hpp"
#include "cuda/matmul_grouped/matmul_grouped.hpp"
#include "cuda/permute/kernels.hpp"
#include "cuda/quantize/int4_kernels.hpp"
#include "cuda/quantize/kernels.hpp"
#include "cuda/runtime/device.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

cudaError_t load_all_kernels(const Device &device, const GpuFamily &family) {
  const CurrentDevice current(device.index);
  cudaError_t error = current.error();
  if (error == cudaSuccess) error = load_kernels(kernels_of<DequantKernels>(family));
  if (error == cudaSuccess) error = load_kernels(kernels_of<QuantizeKernels>(family));
  if (error == cudaSuccess) error = load_kernels(kernels_of<Int4DequantKernels>(family));
  if (error == cudaSuccess) error = load_kernels(kernels_of<Int4QuantizeKernels>(family));
  if (error == cudaSuccess) error = load_kernels(kernels_of<PermuteKernels>(family));
  if (error == cudaSuccess) error = load_kernels(kernels_of<LoraGradKernels>(family));
  if (error == cudaSuccess) error = load_matmul_kernels(family, device);
  if (error == cudaSuccess) error = load_matmul_grouped_kernels(family, device);
  return error;
}

}  // namespace

nf4_status device_info(int index, nf4_device &info) {
  info.runtime_version = CUDART_VERSION;
  cudaError_t error = cudaDriverGetVersion(&info.driver_version);
  if (error != cudaSuccess) return fail_cuda(error, "cudaDriverGetVersion");
  if (const nf4_status status = check_device(index, info.device_count)) return status;
  cudaDeviceProp properties;
  error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess) return fail_cuda(error, "cudaGetDeviceProperties");
  info.compute_capability = properties.major * 10 + properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  static_assert(sizeof info.name == sizeof properties.name);
  std::memcpy(info.name, properties.name, sizeof info.name);
  Device device;
  if (const nf4_status status = cached_device(index, device)) return status;
  const GpuFamily *family = family_for(info.compute_capability);
  if (family == nullptr) return no_family(device);
  std::strncpy(info.dequant_variant, family->name, sizeof info.dequant_variant - 1);
  info.shared_memory_bytes = device.shared_bytes;
  LaunchTarget target{device, family, nullptr};
  info.timed = facts_of(target).wgmma;
  if (CostedGpu gpu; !info.timed && have_built_in_costs() && find_costed_gpu(target, gpu))
    info.timed = have_built_in_costs_of(gpu);
  error = load_all_kernels(device, *family);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "loading the kernels");
}

}  // namespace nf4::cuda
