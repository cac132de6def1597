// The functions of the CUDA driver that libnf4 asks the runtime for.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <string>

#include "standin_cuda/state.hpp"

using namespace nf4::test::standin;

#define SITE __builtin_return_address(0)

namespace {

using Needs = Entry::Needs;

// The numbers of the driver's errors are those of the runtime.
CUresult result(cudaError_t error) { return static_cast<CUresult>(error); }

bool is_in(CUdeviceptr address, MemoryKind kind, int device) {
  return address - reinterpret_cast<uintptr_t>(memory(kind, device)) < kMemoryBytes;
}

CUresult context_id(CUcontext, unsigned long long *id) {
  Entry entry("cuCtxGetId", SITE, Needs::kNothing);
  if (!entry.failed()) *id = machine().context(machine().current);
  return result(entry.error());
}

CUresult pointer_attributes(unsigned count, CUpointer_attribute *attributes, void **values,
                            CUdeviceptr address) {
  Entry entry("cuPointerGetAttributes", SITE);
  if (entry.failed()) return result(entry.error());
  unsigned type = 0;
  const bool managed = is_in(address, MemoryKind::kManaged, 0);
  int device = 0;
  if (managed) type = CU_MEMORYTYPE_DEVICE;
  if (is_in(address, MemoryKind::kPinned, 0)) type = CU_MEMORYTYPE_HOST;
  for (int each = 0; each < static_cast<int>(machine().gpus.size()); ++each)
    if (is_in(address, MemoryKind::kDevice, each)) {
      type = CU_MEMORYTYPE_DEVICE;
      device = each;
    }
  for (unsigned i = 0; i < count; ++i) {
    if (attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
      *static_cast<unsigned *>(values[i]) = type;
    else if (attributes[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED)
      *static_cast<unsigned *>(values[i]) = managed;
    else if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
      *static_cast<int *>(values[i]) = device;
    else
      return result(entry.refuse(cudaErrorInvalidValue, "an attribute without a stand-in"));
  }
  return CUDA_SUCCESS;
}

int element_bytes(CUtensorMapDataType type) {
  return type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : type == CU_TENSOR_MAP_DATA_TYPE_UINT32 ? 4 : 0;
}

// The requirements of cuTensorMapEncodeTiled for its arguments (CUDA Driver API, "Tensor Map Object
// Management"), of tiles without interleave; empty if all is well.
std::string what_is_wrong(CUtensorMapDataType type, unsigned rank, const void *address,
                          const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                          const cuuint32_t *steps, CUtensorMapSwizzle swizzle) {
  const auto item = static_cast<cuuint64_t>(element_bytes(type));
  const cuuint64_t span = swizzle == CU_TENSOR_MAP_SWIZZLE_64B    ? 64
                          : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                                  : 1024;
  if (machine().gpu().compute_capability < 90) return "on a GPU before Hopper";
  if (item == 0 || rank != 2) return "a type or rank without a stand-in";
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return "the address";
  for (unsigned i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > cuuint64_t{1} << 32) return "size " + std::to_string(sizes[i]);
    if (box[i] == 0 || box[i] > 256) return "box of " + std::to_string(box[i]);
    if (steps[i] != 1) return "element strides";
  }
  if (strides[0] % 16 != 0 || strides[0] >= cuuint64_t{1} << 40 || strides[0] < sizes[0] * item)
    return "stride " + std::to_string(strides[0]);
  if (box[0] * item % 16 != 0 || box[0] * item > span)
    return "box of " + std::to_string(box[0] * item) + " bytes";
  return {};
}

CUresult tensor_map(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                    const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                    const cuuint32_t *steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Entry entry("cuTensorMapEncodeTiled", SITE, Needs::kNothing);
  if (entry.failed()) return result(entry.error());
  const std::string wrong = what_is_wrong(type, rank, address, sizes, strides, box, steps, swizzle);
  if (!wrong.empty()) return result(entry.refuse(cudaErrorInvalidValue, wrong));
  *map = {};
  return CUDA_SUCCESS;
}

// Like cudaStreamGetDevice, it ends the capture of its stream, and in the strict modes that of
// others.
cudaError_t ask(Entry &entry, CUstream stream, int &device) {
  entry.on_stream(stream);
  if (entry.failed()) return entry.error();
  Machine &m = machine();
  m.end_strict_capture();
  if (m.capturing == stream) m.capture_valid = false;
  const auto found = m.stream_devices.find(stream);
  if (found == m.stream_devices.end())
    return entry.refuse(cudaErrorInvalidResourceHandle, "a default stream");
  device = found->second;
  return cudaSuccess;
}

CUresult stream_device(CUstream stream, CUdevice *device) {
  Entry entry("cuStreamGetDevice", SITE);
  return result(ask(entry, stream, *device));
}

// A device's context is the number of the device, from 1.
CUresult stream_context(CUstream stream, CUcontext *context) {
  Entry entry("cuStreamGetCtx", SITE);
  int device = 0;
  if (ask(entry, stream, device) == cudaSuccess)
    *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
  return result(entry.error());
}

CUresult push_context(CUcontext context) {
  Entry entry("cuCtxPushCurrent", SITE);
  if (entry.failed()) return result(entry.error());
  machine().pushed.push_back(machine().current);
  machine().current = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
  return CUDA_SUCCESS;
}

CUresult pop_context(CUcontext *) {
  Entry entry("cuCtxPopCurrent", SITE, Needs::kNothing);
  if (entry.failed()) return result(entry.error());
  if (machine().pushed.empty())
    return result(entry.refuse(cudaErrorDeviceUninitialized, "no context was pushed"));
  machine().current = machine().pushed.back();
  machine().pushed.pop_back();
  return CUDA_SUCCESS;
}

CUresult context_device(CUdevice *device) {
  Entry entry("cuCtxGetDevice", SITE);
  if (!entry.failed()) *device = machine().current;
  return result(entry.error());
}

// A function since a version of CUDA, of which NVIDIA's headers have a type.
struct Row {
  const char *name;
  int since;
  void *function;
};
template <class Type>
constexpr int declared(int since) {
  return since;
}
#define SINCE(version, name, function) \
  Row { #name, declared<PFN_##name##_v##version>(version), reinterpret_cast<void *>(function) }
const Row kRows[] = {
    SINCE(2000, cuCtxGetDevice, context_device),
    SINCE(4000, cuCtxPopCurrent, pop_context),
    SINCE(4000, cuCtxPushCurrent, push_context),
    SINCE(7000, cuPointerGetAttributes, pointer_attributes),
    SINCE(9020, cuStreamGetCtx, stream_context),
    SINCE(12000, cuCtxGetId, context_id),
    SINCE(12000, cuTensorMapEncodeTiled, tensor_map),
    SINCE(12080, cuStreamGetDevice, stream_device),
};

}  // namespace

const char *nf4::test::standin::driver_function(const std::string &name, int version,
                                                void *&function) {
  function = nullptr;
  for (const Row &row : kRows) {
    if (row.name != name) continue;
    if (row.since > version) return "asked for before it was there";
    if (row.since <= machine().driver) function = row.function;
    return nullptr;
  }
  return "no stand-in for it";
}
