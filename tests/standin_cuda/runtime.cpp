// The functions of the CUDA runtime that libnf4 calls, and those that it must not call. A program
// that needs another one is not linked.
#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>

#include "standin_cuda/state.hpp"

using namespace nf4::test::standin;

#define SITE __builtin_return_address(0)

namespace {

using Needs = Entry::Needs;

constexpr unsigned kMaxThreads = 1024, kMaxCluster = 8;

std::map<const void *, std::string> &kernels() {
  static std::map<const void *, std::string> all;
  return all;
}

bool is_index(int device) {
  return device >= 0 && device < static_cast<int>(machine().gpus.size());
}

int device_of(cudaStream_t stream) {
  const auto found = machine().stream_devices.find(stream);
  return found == machine().stream_devices.end() ? machine().current : found->second;
}

int allowed_shared_bytes(const void *kernel) {
  const auto &all = machine().shared_bytes;
  const auto found = all.find({machine().context(machine().current), kernel});
  return found == all.end() ? kDefaultSharedBytes : std::max(found->second, kDefaultSharedBytes);
}

struct Attributes {
  unsigned cluster = 1;
  bool pdl = false;
};
Attributes attributes_of(const cudaLaunchConfig_t &config) {
  Attributes found;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute &attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension)
      found.cluster =
          attribute.val.clusterDim.x * attribute.val.clusterDim.y * attribute.val.clusterDim.z;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      found.pdl = attribute.val.programmaticStreamSerializationAllowed != 0;
  }
  return found;
}

// Why the GPU cannot run it (CUDA C++ Programming Guide, technical specifications per compute
// capability); empty if it can.
std::string what_is_wrong(const cudaLaunchConfig_t &config, const void *kernel) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const Attributes attributes = attributes_of(config);
  const bool hopper = machine().gpu().compute_capability >= 90;
  if (kernel_name(kernel) == nullptr) return "no such kernel";
  if (grid.x == 0 || grid.x > INT_MAX || grid.y != 1 || grid.z != 1) return "grid";
  if (block.x == 0 || block.x > kMaxThreads || block.x % 32 != 0 || block.y != 1 || block.z != 1)
    return "block of " + std::to_string(block.x);
  if (config.dynamicSmemBytes > static_cast<size_t>(allowed_shared_bytes(kernel)))
    return "shared memory of " + std::to_string(config.dynamicSmemBytes) + " bytes, and " +
           std::to_string(allowed_shared_bytes(kernel)) + " are allowed";
  if (attributes.cluster == 0 || attributes.cluster > kMaxCluster ||
      grid.x % std::max(attributes.cluster, 1u) != 0)
    return "clusters of " + std::to_string(attributes.cluster) + " in " + std::to_string(grid.x);
  if (!hopper && (attributes.cluster > 1 || attributes.pdl)) return "an attribute of Hopper";
  return {};
}

cudaError_t forbidden(const char *function, const void *site) {
  Entry entry(function, site);
  machine().end_strict_capture();
  return entry.refuse(cudaErrorNotSupported, "no launch may call it");
}

}  // namespace

const char *nf4::test::standin::kernel_name(const void *function) {
  const auto found = kernels().find(function);
  return found == kernels().end() ? nullptr : found->second.c_str();
}

extern "C" {

// ---- What nvcc's code calls when the program starts --------------------------------------------

void **__cudaRegisterFatBinary(void *binary) { return static_cast<void **>(binary); }
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, uint3 *,
                            uint3 *, dim3 *, dim3 *, int *) {
  kernels()[function] = name;
}
// Of launches by <<<>>>, of which there are none.
cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaGetKernel(cudaKernel_t *, const void *) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t) {
  return forbidden("__cudaLaunchKernel", SITE);
}
cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) {
  return forbidden("cudaLaunchKernel", SITE);
}

// ---- Devices -----------------------------------------------------------------------------------

cudaError_t cudaDriverGetVersion(int *version) {
  Entry entry("cudaDriverGetVersion", SITE, Needs::kNothing);
  if (!entry.failed()) *version = machine().gpus.empty() ? 0 : machine().driver;
  return entry.error();
}

cudaError_t cudaGetDeviceCount(int *count) {
  Entry entry("cudaGetDeviceCount", SITE, Needs::kNothing);
  if (entry.failed()) return entry.error();
  *count = static_cast<int>(machine().gpus.size());
  const bool old = machine().driver < kOldestDriver;
  return *count == 0 || old ? entry.fail(cudaErrorInsufficientDriver) : cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  Entry entry("cudaGetDevice", SITE, Needs::kNothing);
  if (!entry.failed()) *device = machine().current;
  return entry.error();
}

cudaError_t cudaSetDevice(int device) {
  Entry entry("cudaSetDevice", SITE, Needs::kNothing);
  if (entry.failed()) return entry.error();
  if (!is_index(device)) return entry.refuse(cudaErrorInvalidDevice, "index");
  machine().current = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  Entry entry("cudaDeviceGetAttribute", SITE, Needs::kNothing);
  if (entry.failed()) return entry.error();
  if (!is_index(device)) return entry.refuse(cudaErrorInvalidDevice, "index");
  const Gpu &gpu = machine().gpus[device];
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = gpu.compute_capability / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = gpu.compute_capability % 10;
      return cudaSuccess;
    case cudaDevAttrPageableMemoryAccess:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = gpu.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = gpu.shared_bytes;
      return cudaSuccess;
    default:
      return entry.refuse(cudaErrorInvalidValue, "an attribute that the stand-in does not have");
  }
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
  Entry entry("cudaGetDeviceProperties", SITE, Needs::kNothing);
  if (entry.failed()) return entry.error();
  if (!is_index(device)) return entry.refuse(cudaErrorInvalidDevice, "index");
  const Gpu &gpu = machine().gpus[device];
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "stand-in %d", gpu.compute_capability);
  properties->major = gpu.compute_capability / 10;
  properties->minor = gpu.compute_capability % 10;
  properties->multiProcessorCount = gpu.multiprocessors;
  properties->totalGlobalMem = size_t{1} << 37;
  return cudaSuccess;
}

// ---- Kernels -----------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
  Entry entry("cudaFuncGetAttributes", SITE);
  if (entry.failed()) return entry.error();
  if (kernel_name(kernel) == nullptr)
    return entry.refuse(cudaErrorInvalidDeviceFunction, "no such kernel");
  *attributes = {};
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
  Entry entry("cudaFuncSetAttribute", SITE);
  if (entry.failed()) return entry.error();
  Machine &m = machine();
  if (kernel_name(kernel) == nullptr)
    return entry.refuse(cudaErrorInvalidDeviceFunction, "no such kernel");
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      value > m.gpu().shared_bytes)
    return entry.refuse(cudaErrorInvalidValue,
                        std::to_string(value) + " bytes of " + kernel_name(kernel));
  m.shared_bytes[{m.context(m.current), kernel}] = value;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *kernel,
                                           const cudaLaunchConfig_t *config) {
  Entry entry("cudaOccupancyMaxActiveClusters", SITE);
  if (entry.failed()) return entry.error();
  if (const std::string wrong = what_is_wrong(*config, kernel); !wrong.empty())
    return entry.refuse(cudaErrorInvalidValue, wrong);
  *clusters = machine().gpu().multiprocessors / static_cast<int>(attributes_of(*config).cluster);
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **) {
  const char *const name = kernel_name(kernel);
  Entry entry("cudaLaunchKernelExC", SITE, Needs::kContext, name == nullptr ? "" : name);
  Machine &m = machine();
  entry.on_stream(config->stream);
  if (entry.failed()) return entry.error();
  if (const std::string wrong = what_is_wrong(*config, kernel); !wrong.empty())
    return entry.refuse(cudaErrorInvalidValue, wrong + " of " + (name == nullptr ? "NULL" : name));
  if (device_of(config->stream) != m.current)
    return entry.refuse(cudaErrorInvalidResourceHandle, "the stream is of another device");
  const bool legacy = config->stream == nullptr || config->stream == cudaStreamLegacy;
  if (legacy && m.capturing != nullptr) {
    m.capture_valid = false;
    return entry.refuse(cudaErrorStreamCaptureImplicit, "on the legacy stream during a capture");
  }
  const Attributes attributes = attributes_of(*config);
  m.launches.push_back({name, config->gridDim, config->blockDim, config->dynamicSmemBytes,
                        attributes.cluster, attributes.pdl, m.current, config->stream});
  return cudaSuccess;
}

// ---- Streams -----------------------------------------------------------------------------------

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  Entry entry("cudaStreamIsCapturing", SITE);
  entry.on_stream(stream);
  if (entry.failed()) return entry.error();
  const Machine &m = machine();
  const bool captured = m.capturing != nullptr && m.capturing == stream;
  *status = !captured         ? cudaStreamCaptureStatusNone
            : m.capture_valid ? cudaStreamCaptureStatusActive
                              : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  Entry entry("cudaThreadExchangeStreamCaptureMode", SITE, Needs::kNothing);
  if (!entry.failed()) std::swap(*mode, machine().capture_mode);
  return entry.error();
}

// ---- Errors, and functions of the driver -------------------------------------------------------

const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    default:
      return "another error";
  }
}
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
  Entry entry("cudaGetDriverEntryPointByVersion", SITE, Needs::kNothing, name);
  if (entry.failed()) return entry.error();
  const char *const wrong = driver_function(name, static_cast<int>(version), *found);
  *result = wrong != nullptr    ? cudaDriverEntryPointSymbolNotFound
            : *found == nullptr ? cudaDriverEntryPointVersionNotSufficent
                                : cudaDriverEntryPointSuccess;
  return wrong == nullptr ? cudaSuccess : entry.refuse(cudaErrorSymbolNotFound, wrong);
}

// ---- What a library must not call --------------------------------------------------------------

#define FORBIDDEN(function, parameters) \
  cudaError_t function parameters { return forbidden(#function, SITE); }
FORBIDDEN(cudaMalloc, (void **, size_t))
FORBIDDEN(cudaMallocAsync, (void **, size_t, cudaStream_t))
FORBIDDEN(cudaMallocHost, (void **, size_t))
FORBIDDEN(cudaFree, (void *))
FORBIDDEN(cudaFreeAsync, (void *, cudaStream_t))
FORBIDDEN(cudaMemcpy, (void *, const void *, size_t, cudaMemcpyKind))
FORBIDDEN(cudaMemset, (void *, int, size_t))
FORBIDDEN(cudaDeviceReset, ())
FORBIDDEN(cudaDeviceSynchronize, ())
FORBIDDEN(cudaStreamSynchronize, (cudaStream_t))
FORBIDDEN(cudaStreamQuery, (cudaStream_t))
FORBIDDEN(cudaGetLastError, ())  // it would clear an error of somebody else
#undef FORBIDDEN

}  // extern "C"
