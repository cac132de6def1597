#include "cuda/device.hpp"

#include <cuda.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "cuda/backend.hpp"
#include "cuda/dequant/select.hpp"
#include "cuda/driver.hpp"
#include "cuda/matmul/select.hpp"
#include "cuda/quantize/select.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

DriverFunction<decltype(&cuCtxGetId)> get_context_id("cuCtxGetId", 12000);

// A number that no other context of this process ever has; 0 if none is current.
uint64_t current_context() {
  decltype(&cuCtxGetId) get_id;
  unsigned long long id = 0;
  if (get_context_id.find(get_id) != cudaSuccess || get_id(nullptr, &id) != CUDA_SUCCESS) return 0;
  return id;
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
  device = {index, major * 10 + minor, multiprocessors, shared, pageable != 0};
  return error;
}

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

constexpr int kUnknownDevice = -1;

bool plain_launches = false;

bool is_default_stream(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

// How many devices there are, asked once: a process never gets more.
cudaError_t count_devices(int &count) {
  static std::atomic<int> known{0};
  count = known.load(std::memory_order_relaxed);
  if (count != 0) return cudaSuccess;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess) known.store(count, std::memory_order_relaxed);
  return error;
}

// What the driver knows of an address.
struct Memory {
  unsigned type;     // CUmemorytype; kUnregistered: host memory that CUDA was not told of
  unsigned managed;  // not 0: moves between the host and devices
  int device;
};
constexpr unsigned kUnregistered = 0;

DriverFunction<decltype(&cuPointerGetAttributes)> pointer_get_attributes("cuPointerGetAttributes",
                                                                         12000);

// Half the time of cudaPointerGetAttributes, which asks for more; it is asked of each operand
// in every launch.
cudaError_t find_memory(const void *address, Memory &memory) {
  decltype(&cuPointerGetAttributes) get;
  const cudaError_t error = pointer_get_attributes.find(get);
  if (error != cudaSuccess) return error;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                      CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void *values[] = {&memory.type, &memory.managed, &memory.device};
  memory = {};
  // The numbers of the driver's errors are those of the runtime.
  return static_cast<cudaError_t>(
      get(3, attributes, values, reinterpret_cast<CUdeviceptr>(address)));
}

// An operand, and of which product where there are several.
constexpr int kOnlyProduct = -1;
struct Named {
  const Operand *operand = nullptr;
  int product = kOnlyProduct;

  struct Text {
    char text[48];
  };
  Text text() const {
    Text named;
    const char *format = product == kOnlyProduct ? "%s" : "%s of product %d";
    std::snprintf(named.text, sizeof named.text, format, operand->name, product);
    return named;
  }
};

// What decides where a launch goes: the last operand in a device's memory, and that device; the
// first one in memory that CUDA was not told of.
struct Located {
  Named decisive;
  int device = kUnknownDevice;
  Named on_host;
};

nf4_status look_at(const Operands &operands, int product, Located &found) {
  for (const Operand &operand : operands) {
    Memory memory;
    const cudaError_t error = find_memory(operand.address, memory);
    if (error != cudaSuccess) return fail_cuda(error, "cuPointerGetAttributes");
    const Named named{&operand, product};
    if (memory.type == kUnregistered && found.on_host.operand == nullptr) found.on_host = named;
    if (memory.type != CU_MEMORYTYPE_DEVICE || memory.managed) continue;
    if (found.decisive.operand != nullptr && memory.device != found.device)
      return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is memory of device %d, but %s is of device %d",
                  named.text().text, memory.device, found.decisive.text().text, found.device);
    found.decisive = named;
    found.device = memory.device;
  }
  return NF4_STATUS_OK;
}

// The device of a stream, as far as it can be told without harm: the question ends a
// capture of that stream. Where there is one device, there is nothing to ask.
cudaError_t device_of_stream(cudaStream_t stream, int devices, int &index) {
  index = kUnknownDevice;
  if (devices == 1 || is_default_stream(stream)) return cudaSuccess;
  cudaStreamCaptureStatus capture;
  cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess || capture != cudaStreamCaptureStatusNone) return error;
  // Other streams may be in the middle of a capture that forbids this thread much.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  error = cudaStreamGetDevice(stream, &index);
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  return error != cudaSuccess ? error : restored;
}

}  // namespace

nf4_status fail_cuda(cudaError_t error, const char *call) {
  nf4_status status = NF4_STATUS_CUDA_ERROR;
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
      error == cudaErrorStubLibrary || error == cudaErrorSystemDriverMismatch)
    status = NF4_STATUS_NO_DEVICE;
  int driver = 0;
  if (status == NF4_STATUS_NO_DEVICE && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
    return fail(status, "no CUDA driver is installed");
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion)
    status = NF4_STATUS_UNSUPPORTED_DEVICE;
  return fail(status, "%s: %s (%s)", call, cudaGetErrorString(error), cudaGetErrorName(error));
}

nf4_status no_family(const Device &device) {
  return fail(NF4_STATUS_UNSUPPORTED_DEVICE,
              "device %d has compute capability %d.%d, for which this libnf4 has no kernel",
              device.index, device.compute_capability / 10, device.compute_capability % 10);
}

nf4_status locate(const Operands &operands, cudaStream_t stream, Device &device) {
  const Operands *const only = &operands;
  return locate(&only, 1, stream, device);
}

nf4_status locate(const Operands *const *products, int count, cudaStream_t stream, Device &device) {
  int devices = 0;
  cudaError_t error = count_devices(devices);  // which initialises CUDA
  if (error != cudaSuccess) return fail_cuda(error, "cudaGetDeviceCount");
  Located found;
  for (int i = 0; i < count; ++i)
    if (const nf4_status status = look_at(*products[i], count > 1 ? i : kOnlyProduct, found))
      return status;
  int streams = kUnknownDevice;
  error = device_of_stream(stream, devices, streams);
  if (error != cudaSuccess) return fail_cuda(error, "finding the stream's device");
  const Named &decisive = found.decisive;
  if (decisive.operand != nullptr && streams != kUnknownDevice && streams != found.device)
    return fail(NF4_STATUS_INVALID_ARGUMENT,
                "stream is of device %d, but %s is memory of device %d", streams,
                decisive.text().text, found.device);
  int index = decisive.operand != nullptr ? found.device : streams;
  if (index == kUnknownDevice) error = cudaGetDevice(&index);
  if (error != cudaSuccess) return fail_cuda(error, "cudaGetDevice");
  if (const nf4_status status = cached_device(index, device)) return status;
  if (found.on_host.operand != nullptr && !device.reaches_host_memory)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is host memory (%p), which device %d cannot reach",
                found.on_host.text().text, found.on_host.operand->address, index);
  return NF4_STATUS_OK;
}

bool SetInContext::has(int device) const {
  const uint64_t context = current_context();
  return context != 0 && contexts_[device].load(std::memory_order_acquire) == context;
}

void SetInContext::set(int device) {
  contexts_[device].store(current_context(), std::memory_order_release);
}

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
  if (launch.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;  // more than memory holds
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (launch.waits && !plain_launches) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void *parameters[] = {const_cast<void *>(args)};
  return cudaLaunchKernelExC(&config, launch.kernel, parameters);
}

CurrentDevice::CurrentDevice(int device) {
  error_ = cudaGetDevice(&previous_);
  if (error_ != cudaSuccess || previous_ == device) return;
  error_ = cudaSetDevice(device);
  switched_ = error_ == cudaSuccess;
}

CurrentDevice::~CurrentDevice() {
  if (switched_) cudaSetDevice(previous_);
}

nf4_status device_info(int index, nf4_device &info) {
  info.runtime_version = CUDART_VERSION;
  cudaError_t error = cudaDriverGetVersion(&info.driver_version);
  if (error == cudaSuccess) error = cudaGetDeviceCount(&info.device_count);
  if (error != cudaSuccess) return fail_cuda(error, "cudaGetDeviceCount");
  if (index < 0 || index >= info.device_count)
    return fail(NF4_STATUS_INVALID_ARGUMENT, "device is %d; there are %d", index,
                info.device_count);
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
  const DequantFamily *family = dequant_family_for(info.compute_capability);
  if (family == nullptr) return no_family(device);
  std::strncpy(info.dequant_variant, family->family.name, sizeof info.dequant_variant - 1);
  const CurrentDevice current(index);
  error = current.error();
  if (error == cudaSuccess) error = load_dequant_kernels(*family);
  if (error == cudaSuccess) error = load_quantize_kernels(info.compute_capability);
  if (error == cudaSuccess) error = load_matmul_kernels(device);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "loading the kernels");
}

}  // namespace nf4::cuda
