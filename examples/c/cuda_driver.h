/* The functions of the CUDA driver API that the examples need. They are loaded at run time, so the
 * examples compile without the CUDA toolkit and run on a machine without a driver. */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef uint64_t CUdeviceptr;

static int (*cuInit)(unsigned);
static int (*cuDevicePrimaryCtxRetain)(CUcontext *, int);
static int (*cuDevicePrimaryCtxRelease)(int);
static int (*cuCtxSetCurrent)(CUcontext);
static int (*cuMemAlloc)(CUdeviceptr *, size_t);
static int (*cuMemFree)(CUdeviceptr);
static int (*cuMemcpyHtoD)(CUdeviceptr, const void *, size_t);
static int (*cuMemcpyDtoH)(void *, CUdeviceptr, size_t);
static int (*cuStreamCreate)(CUstream *, unsigned);
static int (*cuStreamSynchronize)(CUstream);
static int (*cuStreamDestroy)(CUstream);
static int (*cuGetErrorName)(int, const char **);

/* Exits if there is no driver. The examples call nf4_device_info first, which says whether there
 * is one. */
static void cuda_driver_load(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  const struct {
    void *function;
    const char *name;
  } table[] = {
      {&cuInit, "cuInit"},
      {&cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"},
      {&cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2"},
      {&cuCtxSetCurrent, "cuCtxSetCurrent"},
      {&cuMemAlloc, "cuMemAlloc_v2"},
      {&cuMemFree, "cuMemFree_v2"},
      {&cuMemcpyHtoD, "cuMemcpyHtoD_v2"},
      {&cuMemcpyDtoH, "cuMemcpyDtoH_v2"},
      {&cuStreamCreate, "cuStreamCreate"},
      {&cuStreamSynchronize, "cuStreamSynchronize"},
      {&cuStreamDestroy, "cuStreamDestroy_v2"},
      {&cuGetErrorName, "cuGetErrorName"},
  };
  for (size_t i = 0; i < sizeof table / sizeof *table; ++i) {
    void *address = driver == NULL ? NULL : dlsym(driver, table[i].name);
    if (address == NULL) {
      fprintf(stderr, "CUDA driver: %s\n", dlerror());
      exit(1);
    }
    *(void **)table[i].function = address;
  }
}

static void cuda_check(int result) {
  const char *name = NULL;
  if (result == 0) return;
  cuGetErrorName(result, &name);
  fprintf(stderr, "CUDA: %s\n", name == NULL ? "unknown error" : name);
  exit(1);
}

/* Returns when the copy is done. cuMemcpyHtoD from pageable memory may return earlier, and a stream
 * that does not wait for the default stream does not wait for that copy. */
static void copy_to_device(CUdeviceptr to, const void *from, size_t bytes) {
  cuda_check(cuMemcpyHtoD(to, from, bytes));
  cuda_check(cuStreamSynchronize(NULL));
}

#endif
