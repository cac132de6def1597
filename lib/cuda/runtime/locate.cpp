#include "cuda/runtime/locate.hpp"

#include <cuda.h>

#include <atomic>
#include <cstdio>

#include "cuda/runtime/driver.hpp"
#include "status.hpp"

namespace nf4::cuda {
namespace {

constexpr int kUnknownDevice = -1;

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

// The driver's knowledge of an address.
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
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                      CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void *values[] = {&memory.type, &memory.managed, &memory.device};
  memory = {};
  return pointer_get_attributes.call(3u, attributes, values,
                                     reinterpret_cast<CUdeviceptr>(address));
}

// An operand, and the number of its product if there are several.
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

// The operands that decide where a launch goes: the last one in a device's memory, with that
// device, and the first one in memory that CUDA was not told of.
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

// The number of a device is its ordinal, to the driver as to the runtime. Headers of CUDA 12.8 and
// later declare the function.
using StreamGetDevice = CUresult (*)(CUstream stream, CUdevice *device);
DriverFunction<StreamGetDevice> stream_get_device("cuStreamGetDevice", 12080);
DriverFunction<CUresult (*)(CUstream, CUcontext *)> stream_get_context("cuStreamGetCtx", 9020);
DriverFunction<CUresult (*)(CUcontext)> push_context("cuCtxPushCurrent", 4000);
using PopContext = CUresult (*)(CUcontext *context);
DriverFunction<PopContext> pop_context("cuCtxPopCurrent", 4000);
DriverFunction<CUresult (*)(CUdevice *)> context_get_device("cuCtxGetDevice", 2000);

// Drivers before CUDA 12.8 tell the device of the current context alone. What pops the context is
// found before it is pushed.
cudaError_t device_of_context(CUcontext context, CUdevice &device) {
  PopContext pop;
  cudaError_t error = pop_context.find(pop);
  if (error == cudaSuccess) error = push_context.call(context);
  if (error != cudaSuccess) return error;
  error = context_get_device.call(&device);
  CUcontext popped;
  const auto restored = static_cast<cudaError_t>(pop(&popped));
  return error != cudaSuccess ? error : restored;
}

cudaError_t ask_stream(cudaStream_t stream, int &device) {
  cudaError_t error = stream_get_device.call(stream, &device);
  if (error != cudaErrorSymbolNotFound) return error;
  CUcontext context;
  error = stream_get_context.call(stream, &context);
  return error != cudaSuccess ? error : device_of_context(context, device);
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
  error = ask_stream(stream, index);
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  return error != cudaSuccess ? error : restored;
}

// The driver does not know memory that a capture allocates before its graph runs: unregistered
// memory may be that.
bool is_capturing(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return false;
  cudaStreamCaptureStatus capture;
  return cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
         capture == cudaStreamCaptureStatusActive;
}

}  // namespace

nf4_status locate(const Operands *const *products, int count, cudaStream_t stream, Device &device) {
  int devices = 0;
  cudaError_t error = count_devices(devices);  // initialises CUDA
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
  if (found.on_host.operand != nullptr && !device.reaches_host_memory && !is_capturing(stream))
    return fail(NF4_STATUS_INVALID_ARGUMENT, "%s is host memory (%p), which device %d cannot reach",
                found.on_host.text().text, found.on_host.operand->address, index);
  return NF4_STATUS_OK;
}

}  // namespace nf4::cuda
