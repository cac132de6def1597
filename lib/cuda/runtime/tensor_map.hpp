// Tensor maps, by which a kernel copies boxes of a matrix (CUDA driver API, "Tensor Map Object
// Management").
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nf4::cuda {

// A CUtensorMap, which kernels get as an argument.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

struct ByteMatrix {
  const void *address;  // on 16 bytes
  int64_t rows;
  int64_t row_bytes;  // a multiple of 16
};

// Boxes of box_rows rows of box_bytes bytes, 32, 64 or 128, of a matrix whose rows are at a
// distance of `pitch` bytes, a multiple of 16. In the 64-byte or 128-byte swizzle, or in none.
// What is read past the matrix is 0.
cudaError_t make_tensor_map(const ByteMatrix &matrix, int64_t pitch, int box_bytes, int box_rows,
                            TensorMap &map);

// Boxes of box_rows rows of box_words words of 32 bits, at most 256, of a matrix whose rows follow
// each other. In the order of the matrix.
cudaError_t make_word_tensor_map(const ByteMatrix &matrix, int box_words, int box_rows,
                                 TensorMap &map);

}  // namespace nf4::cuda
