// One spelling for code that the host compiler and nvcc both see.
#pragma once

#if defined(__CUDACC__)
#define NF4_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define NF4_HOST_DEVICE inline
#endif
