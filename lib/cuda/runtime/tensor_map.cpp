#include "cuda/runtime/tensor_map.hpp"

#include <cuda.h>

#include <cstring>

#include "cuda/runtime/driver.hpp"

namespace nf4::cuda {
namespace {

DriverFunction<decltype(&cuTensorMapEncodeTiled)> encode_tiled("cuTensorMapEncodeTiled", 12000);

// A matrix of elements of a type, and a box of it.
struct Boxes {
  CUtensorMapDataType type;
  int64_t row_elements;
  int box_elements;  // elements of a row in a box
  int box_rows;
  CUtensorMapSwizzle swizzle;
};

cudaError_t encode(const ByteMatrix &matrix, int64_t pitch, const Boxes &boxes, TensorMap &map) {
  CUtensorMap encoded;
  static_assert(sizeof encoded == sizeof map);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(boxes.row_elements),
                              static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(pitch)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(boxes.box_elements),
                            static_cast<cuuint32_t>(boxes.box_rows)};
  const cuuint32_t element_strides[] = {1, 1};
  const cudaError_t error =
      encode_tiled.call(&encoded, boxes.type, 2u, const_cast<void *>(matrix.address), sizes,
                        strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, boxes.swizzle,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error == cudaSuccess) std::memcpy(&map, &encoded, sizeof map);
  return error;
}

}  // namespace

cudaError_t make_tensor_map(const ByteMatrix &matrix, int64_t pitch, int box_bytes, int box_rows,
                            TensorMap &map) {
  const auto swizzle = box_bytes == 32   ? CU_TENSOR_MAP_SWIZZLE_NONE
                       : box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                         : CU_TENSOR_MAP_SWIZZLE_128B;
  return encode(matrix, pitch,
                {CU_TENSOR_MAP_DATA_TYPE_UINT8, matrix.row_bytes, box_bytes, box_rows, swizzle},
                map);
}

cudaError_t make_word_tensor_map(const ByteMatrix &matrix, int box_words, int box_rows,
                                 TensorMap &map) {
  return encode(matrix, matrix.row_bytes,
                {CU_TENSOR_MAP_DATA_TYPE_UINT32, matrix.row_bytes / 4, box_words, box_rows,
                 CU_TENSOR_MAP_SWIZZLE_NONE},
                map);
}

}  // namespace nf4::cuda
