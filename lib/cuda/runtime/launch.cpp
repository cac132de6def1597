#include "cuda/runtime/launch.hpp"

namespace nf4::cuda {
namespace {

bool plain_launches = false;

}  // namespace

cudaError_t load_kernels(const void *const *kernels, int count) {
  for (int i = 0; i < count; ++i) {
    cudaFuncAttributes attributes;
    if (kernels[i] == nullptr) continue;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernels[i]);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

void force_plain_launches(bool plain) { plain_launches = plain; }

cudaError_t detail::launch(const Launch &launch, const void *args) {
  if (launch.ctas > INT32_MAX) return cudaErrorInvalidConfiguration;  // more than memory holds
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (launch.pdl && !plain_launches) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.ctas));
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void *parameters[] = {const_cast<void *>(args)};
  return cudaLaunchKernelExC(&config, launch.kernel, parameters);
}

}  // namespace nf4::cuda
