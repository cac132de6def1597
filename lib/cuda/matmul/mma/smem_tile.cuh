// The tiles of W and x that a CTA of the mma kernel multiplies, in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/ptx/mma.cuh"

namespace nf4::cuda {
namespace {

// 64 x 64 elements in shared memory. Rows have 128 bytes, or 256 for fp32, in the 128-byte swizzle:
// the 16-byte chunks of one column in eight rows are in different banks, and so are the eight
// chunks of one row.
template <class T>
class SmemTile {
 public:
  static constexpr int kRowChunks = 64 / kPerVector<T>;

  __device__ __forceinline__ explicit SmemTile(uint4 *chunks) : chunks_(chunks) {}
  __device__ __forceinline__ uint4 &chunk(int row, int index) const {
    return chunks_[row * kRowChunks + (index ^ row % 8)];
  }
  // Stores the index-th eight neighbours of a row.
  __device__ __forceinline__ void store(int row, int index, const float (&v)[8]) const {
    if constexpr (kPerVector<T> == 8) {
      chunk(row, index) = pack_vector<T>(v);
    } else {
      chunk(row, index * 2) = pack_vector<T>({v[0], v[1], v[2], v[3]});
      chunk(row, index * 2 + 1) = pack_vector<T>({v[4], v[5], v[6], v[7]});
    }
  }
  // Two 16-bit neighbours, the first at an even column.
  __device__ __forceinline__ uint32_t pair(int row, int column) const {
    return reinterpret_cast<const uint32_t *>(&chunk(row, column / 8))[column % 8 / 2];
  }
  __device__ __forceinline__ float element(int row, int column) const {
    return to_float(
        reinterpret_cast<const T *>(&chunk(row, column / kPerVector<T>))[column % kPerVector<T>]);
  }
  // Four neighbours in fp32.
  __device__ __forceinline__ float4 vector(int row, int index) const {
    return *reinterpret_cast<const float4 *>(&chunk(row, index));
  }
  // Four neighbours of any type.
  __device__ __forceinline__ float4 four(int row, int index) const {
    if constexpr (kPerVector<T> == 4) {
      return vector(row, index);
    } else {
      const uint2 v = reinterpret_cast<const uint2 *>(&chunk(row, index / 2))[index % 2];
      const T *const elements = reinterpret_cast<const T *>(&v);
      return {to_float(elements[0]), to_float(elements[1]), to_float(elements[2]),
              to_float(elements[3])};
    }
  }
  // Operand A of mma_m16n8k16 for 16 rows and columns, and operand B of two products.
  __device__ __forceinline__ void load_a(uint32_t (&a)[4], int row, int column) const {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(a, &chunk(row + lane % 16, column / 8 + lane / 16));
  }
  __device__ __forceinline__ void load_b(uint32_t (&b)[4], int row, int column) const {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(b, &chunk(row + lane / 16 * 8 + lane % 8, column / 8 + lane / 8 % 2));
  }
  // Operand A whose rows are 16 columns of the tile, and whose columns are rows of it.
  __device__ __forceinline__ void load_transposed_a(uint32_t (&a)[4], int row, int column) const {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(a, &chunk(row + lane / 16 * 8 + lane % 8, column / 8 + lane / 8 % 2));
  }

 private:
  uint4 *chunks_;
};

}  // namespace
}  // namespace nf4::cuda
