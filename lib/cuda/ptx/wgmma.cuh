// wgmma with A from registers or shared memory, and setmaxnreg (PTX ISA, "Asynchronous warpgroup
// level matrix instructions"). sm_90a only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx/shared_address.cuh"

namespace nf4::cuda {

// Must come before the first wgmma of a group; makes the threads' register writes visible to it.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the current wgmma group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the latest Pending groups are complete.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// The descriptor of B in shared memory: rows of 128 bytes in the 128-byte swizzle, on a 1024-byte
// boundary. Moving right by 16 elements adds 2 to it.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void *shared) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kLeading = uint64_t{1} << 16;  // not used with a swizzle
  return kSwizzle128 | kEightRows | kLeading | (shared_address(shared) & 0x3ffff) >> 4;
}

// The same for rows of 64 bytes in the 64-byte swizzle, on a 512-byte boundary.
__device__ __forceinline__ uint64_t wgmma_descriptor_64(const void *shared) {
  constexpr uint64_t kSwizzle64 = uint64_t{2} << 62;
  constexpr uint64_t kEightRows = uint64_t{512 >> 4} << 32;
  constexpr uint64_t kLeading = uint64_t{1} << 16;  // not used with a swizzle
  return kSwizzle64 | kEightRows | kLeading | (shared_address(shared) & 0x3ffff) >> 4;
}

// Must come between waiting for a group and reading its accumulators: to the compiler they were
// written when the wgmma was issued.
template <int Count>
__device__ __forceinline__ void wgmma_fence_operand(float (&d)[Count]) {
#pragma unroll
  for (float &each : d) asm volatile("" : "+f"(each)::"memory");
}

// D[64][N] = A[64][16] B[N][16]^T, plus D if Accumulate. Warp w of the warpgroup has rows 16w to
// 16w + 15 of A and D. A lane's a[] is that of mma_m16n8k16, and its d[4j] to d[4j + 3] are the d[]
// there for columns 8j to 8j + 7. Neither may be touched until the group has been waited for. rs
// takes A from registers; ss takes it from shared memory, by a descriptor.
template <int N>
struct Wgmma;

#define NF4_TWO(t) "%" t "0, %" t "1"
#define NF4_FOUR(t) NF4_TWO(t) ", %" t "2, %" t "3"
#define NF4_SIX(t) NF4_FOUR(t) ", %" t "4, %" t "5"
#define NF4_EIGHT(t) NF4_SIX(t) ", %" t "6, %" t "7"
#define NF4_TEN(t) NF4_EIGHT(t) ", %" t "8, %" t "9"
#define NF4_THIRTY NF4_TEN("") ", " NF4_TEN("1") ", " NF4_TEN("2")
#define NF4_FIFTY NF4_THIRTY ", " NF4_TEN("3") ", " NF4_TEN("4")
#define NF4_SEVENTY NF4_FIFTY ", " NF4_TEN("5") ", " NF4_TEN("6")
#define NF4_NINETY NF4_SEVENTY ", " NF4_TEN("7") ", " NF4_TEN("8")
#define NF4_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NF4_D8(i) NF4_D4(i), NF4_D4(i + 4)
#define NF4_D16(i) NF4_D8(i), NF4_D8(i + 8)
#define NF4_D32(i) NF4_D16(i), NF4_D16(i + 16)
#define NF4_D64(i) NF4_D32(i), NF4_D32(i + 32)

// `sums` names the operands of D, o0 to o5 name those after them, and `...` lists D's.
#define NF4_WGMMA_OF(type, name, n, sums, o0, o1, o2, o3, o4, o5, ...)                           \
  template <bool Accumulate>                                                                     \
  static __device__ __forceinline__ void rs(type, float (&d)[n / 2], const uint32_t (&of_a)[4],  \
                                            uint64_t of_b) {                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, " o5                                          \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name "." name " {" sums \
                 "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", p, 1, 1, 0;\n}"                   \
                 : __VA_ARGS__                                                                   \
                 : "r"(of_a[0]), "r"(of_a[1]), "r"(of_a[2]), "r"(of_a[3]), "l"(of_b),            \
                   "n"(Accumulate));                                                             \
  }                                                                                              \
  template <bool Accumulate>                                                                     \
  static __device__ __forceinline__ void ss(type, float (&d)[n / 2], uint64_t of_a,              \
                                            uint64_t of_b) {                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, " o2                                          \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name "." name " {" sums \
                 "}, " o0 ", " o1 ", p, 1, 1, 0, 0;\n}"                                          \
                 : __VA_ARGS__                                                                   \
                 : "l"(of_a), "l"(of_b), "n"(Accumulate));                                       \
  }
#define NF4_WGMMA(n, ...)                               \
  template <>                                           \
  struct Wgmma<n> {                                     \
    NF4_WGMMA_OF(__nv_bfloat16, "bf16", n, __VA_ARGS__) \
    NF4_WGMMA_OF(__half, "f16", n, __VA_ARGS__)         \
  };

NF4_WGMMA(16, NF4_EIGHT(""), "%8", "%9", "%10", "%11", "%12", "%13", NF4_D8(0))
NF4_WGMMA(32, NF4_TEN("") ", " NF4_SIX("1"), "%16", "%17", "%18", "%19", "%20", "%21", NF4_D16(0))
NF4_WGMMA(48, NF4_TEN("") ", " NF4_TEN("1") ", " NF4_FOUR("2"), "%24", "%25", "%26", "%27", "%28",
          "%29", NF4_D16(0), NF4_D8(16))
NF4_WGMMA(64, NF4_THIRTY ", " NF4_TWO("3"), "%32", "%33", "%34", "%35", "%36", "%37", NF4_D32(0))
NF4_WGMMA(80, NF4_THIRTY ", " NF4_TEN("3"), "%40", "%41", "%42", "%43", "%44", "%45", NF4_D32(0),
          NF4_D8(32))
NF4_WGMMA(96, NF4_THIRTY ", " NF4_TEN("3") ", " NF4_EIGHT("4"), "%48", "%49", "%50", "%51", "%52",
          "%53", NF4_D32(0), NF4_D16(32))
NF4_WGMMA(104, NF4_FIFTY ", " NF4_TWO("5"), "%52", "%53", "%54", "%55", "%56", "%57", NF4_D32(0),
          NF4_D16(32), NF4_D4(48))
NF4_WGMMA(128, NF4_FIFTY ", " NF4_TEN("5") ", " NF4_FOUR("6"), "%64", "%65", "%66", "%67", "%68",
          "%69", NF4_D64(0))
NF4_WGMMA(136, NF4_FIFTY ", " NF4_TEN("5") ", " NF4_EIGHT("6"), "%68", "%69", "%70", "%71", "%72",
          "%73", NF4_D64(0), NF4_D4(64))
NF4_WGMMA(152, NF4_SEVENTY ", " NF4_SIX("7"), "%76", "%77", "%78", "%79", "%80", "%81", NF4_D64(0),
          NF4_D8(64), NF4_D4(72))
NF4_WGMMA(176, NF4_SEVENTY ", " NF4_TEN("7") ", " NF4_EIGHT("8"), "%88", "%89", "%90", "%91", "%92",
          "%93", NF4_D64(0), NF4_D16(64), NF4_D8(80))
NF4_WGMMA(208, NF4_NINETY ", " NF4_TEN("9") ", " NF4_FOUR("10"), "%104", "%105", "%106", "%107",
          "%108", "%109", NF4_D64(0), NF4_D32(64), NF4_D8(96))
NF4_WGMMA(256,
          NF4_NINETY ", " NF4_TEN("9") ", " NF4_TEN("10") ", " NF4_TEN("11") ", " NF4_EIGHT("12"),
          "%128", "%129", "%130", "%131", "%132", "%133", NF4_D64(0), NF4_D64(64))

#undef NF4_WGMMA
#undef NF4_WGMMA_OF
#undef NF4_D64
#undef NF4_D32
#undef NF4_D16
#undef NF4_D8
#undef NF4_D4
#undef NF4_NINETY
#undef NF4_SEVENTY
#undef NF4_FIFTY
#undef NF4_THIRTY
#undef NF4_TEN
#undef NF4_EIGHT
#undef NF4_SIX
#undef NF4_FOUR
#undef NF4_TWO

// Sets the number of registers of each thread of this warpgroup to Count; all of its warps execute
// it.
template <int Count>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace nf4::cuda
