// Loads, stores and prefetches with cache hints for which CUDA C++ has no intrinsic (PTX ISA, "Data
// Movement and Conversion Instructions").
#pragma once

#include <cstdint>

#include "cuda/arch.cuh"

namespace nf4::cuda {

// An L2 eviction priority, created once per thread.
struct CachePolicy {
  uint64_t bits;
};

template <class Arch>
__device__ __forceinline__ CachePolicy evict_first() {
  CachePolicy policy{0};
  if constexpr (Arch::kCachePolicies)
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

template <class Arch>
__device__ __forceinline__ CachePolicy evict_normal() {
  CachePolicy policy{0};
  if constexpr (Arch::kCachePolicies)
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

// Loads data that is used once: ld.global.nc, not kept in L1.
template <class Arch>
__device__ __forceinline__ uint32_t load_once(const uint32_t *address, CachePolicy policy) {
  uint32_t value;
  if constexpr (Arch::kCachePolicies)
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.b32 %0, [%1], %2;"
                 : "=r"(value)
                 : "l"(address), "l"(policy.bits));
  else
    asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

template <class Arch>
__device__ __forceinline__ uint32_t load_once(const uint16_t *address, CachePolicy policy) {
  uint16_t value;
  if constexpr (Arch::kCachePolicies)
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.b16 %0, [%1], %2;"
                 : "=h"(value)
                 : "l"(address), "l"(policy.bits));
  else
    asm volatile("ld.global.nc.L1::no_allocate.b16 %0, [%1];" : "=h"(value) : "l"(address));
  return value;
}

template <class Arch>
__device__ __forceinline__ uint4 load_once(const uint4 *address, CachePolicy policy) {
  uint4 v;
  if constexpr (Arch::kCachePolicies)
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address), "l"(policy.bits));
  else
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
  return v;
}

template <class Arch>
__device__ __forceinline__ uint2 load_once(const uint2 *address, CachePolicy policy) {
  uint2 v;
  if constexpr (Arch::kCachePolicies)
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(address), "l"(policy.bits));
  else
    asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(address));
  return v;
}

// Stores data that this kernel does not read again. GPUs without cache policies use .cs,
// evict-first.
template <class Arch>
__device__ __forceinline__ void store_once(uint4 *address, uint4 v, CachePolicy policy) {
  if constexpr (Arch::kCachePolicies)
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy.bits)
                 : "memory");
  else
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// Prefetches into L2; address and size are multiples of 16.
template <class Arch>
__device__ __forceinline__ void prefetch_l2(const void *address, uint32_t bytes) {
  static_assert(Arch::kBulkPrefetch);
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// Prefetches into L2 the sector that contains an address.
__device__ __forceinline__ void prefetch_l2_sector(const void *address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace nf4::cuda
