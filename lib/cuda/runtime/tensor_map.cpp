#include "cuda/runtime/tensor_map.hpp"

#include <cuda.h>

#include <cstring>

#include "cuda/runtime/driver.hpp"

namespace nf4::cuda {
namespace {

DriverFunction<decltype(&cuTensorMapEncodeTiled)> encode_tiled("cuTensorMapEncodeTiled", 12000);

}  // namespace

cudaError_t make_tensor_map(const ByteMatrix &matrix, int64_t pitch, int box_bytes, int box_rows,
                            TensorMap &map) {
  decltype(&cuTensorMapEncodeTiled) encode;
  const cudaError_t error = encode_tiled.find(encode);
  if (error != cudaSuccess) return error;
  CUtensorMap encoded;
  static_assert(sizeof encoded == sizeof map);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrix.row_bytes),
                              static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(pitch)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[] = {1, 1};
  // The numbers of the driver's errors are those of the runtime.
  const auto status = static_cast<cudaError_t>(
      encode(&encoded, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void *>(matrix.address), sizes,
             strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  std::memcpy(&map, &encoded, sizeof map);
  return status;
}

}  // namespace nf4::cuda
