// mma.sync, ldmatrix and stmatrix (PTX ISA, "Matrix Fragments for mma.m16n8k16").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/shared_address.cuh"

namespace nf4::cuda {

// The fragments of a lane for D[16][8] += A[16][16] B[16][8], with g = lane / 4 and t = lane % 4.
//   a[0], a[2]   row g, columns 2t and 2t + 8, each with its right neighbour in the high half
//   a[1], a[3]   the same for row g + 8
//   b[0], b[1]   column g, rows 2t and 2t + 8, each with the next row in the high half
//   d[0], d[1]   row g, columns 2t and 2t + 1
//   d[2], d[3]   the same for row g + 8
__device__ __forceinline__ void mma_m16n8k16(__nv_bfloat16, float (&d)[4], const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16(__half, float (&d)[4], const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Turing has mma.m16n8k8, of fp16 alone: two of them are an mma.m16n8k16, whose a[0], a[1] and b[0]
// are the fragments of the first.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// The instructions of an architecture that make an mma.m16n8k16, and one of them.
template <class Arch>
constexpr int kMmaParts = Arch::kTensorCores ? 1 : 2;
template <class Arch, class T>
__device__ __forceinline__ void mma_part(T, int part, float (&d)[4], const uint32_t (&a)[4],
                                         uint32_t b0, uint32_t b1) {
  if constexpr (Arch::kTensorCores) {
    mma_m16n8k16(T{}, d, a, b0, b1);
  } else {
    static_assert(std::is_same_v<T, __half>);
    mma_m16n8k8(d, a[part * 2], a[part * 2 + 1], part == 0 ? b0 : b1);
  }
}
template <class Arch, class T>
__device__ __forceinline__ void mma_m16n8k16_on(T, float (&d)[4], const uint32_t (&a)[4],
                                                uint32_t b0, uint32_t b1) {
#pragma unroll
  for (int part = 0; part < kMmaParts<Arch>; ++part) mma_part<Arch>(T{}, part, d, a, b0, b1);
}

// Loads four 8 x 8 matrices from shared memory. Lane 8i + j gives the address of 16 bytes, row j of
// matrix i. A lane gets two elements of row lane / 4 of each matrix, as in a[] above.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&matrices)[4], const void *from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(from))
               : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory, each transposed. Lane 8i + j
// gives the address of 16 bytes, row j of matrix i. A lane gets rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&matrices)[4], const void *from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(from))
               : "memory");
}

// Stores four 8 x 8 matrices to shared memory, each transposed. A lane holds two elements of row
// lane / 4 of each matrix, as in d[] above. Lane 8i + j gives the address of 16 bytes for column j
// of matrix i. Compute capability 9.0.
__device__ __forceinline__ void stmatrix_x4_trans(void *to, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(to)),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

}  // namespace nf4::cuda
