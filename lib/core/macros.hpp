// One spelling for code that the host compiler and nvcc both see.
#pragma once

#if defined(__CUDACC__)
#define NF4_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define NF4_HOST_DEVICE inline
#endif

// Marks code that runs on the device, except while a compiler evaluates a constant: there the
// device's intrinsics are unknown.
#if defined(__CUDA_ARCH__)
#define NF4_DEVICE_ONLY(statement) \
  if (!__builtin_is_constant_evaluated()) statement
#else
#define NF4_DEVICE_ONLY(statement)
#endif
