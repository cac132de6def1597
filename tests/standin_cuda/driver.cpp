// The functions of the CUDA driver that libnf4 asks the runtime for.
#include <cuda.h>

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

// What cuTensorMapEncodeTiled asks of its arguments (CUDA Driver API, "Tensor Map Object
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

}  // namespace

void *nf4::test::standin::driver_function(const std::string &name) {
  if (name == "cuCtxGetId") return reinterpret_cast<void *>(context_id);
  if (name == "cuPointerGetAttributes") return reinterpret_cast<void *>(pointer_attributes);
  if (name == "cuTensorMapEncodeTiled") return reinterpret_cast<void *>(tensor_map);
  return nullptr;
}
