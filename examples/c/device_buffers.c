/* Quantizes and dequantizes a weight in raw GPU memory, on a stream of the caller, and compares
 * every byte with the result of the CPU. Exits with 77 if there is no GPU that libnf4 can use.
 *
 *   eval "cc device_buffers.c $(pkg-config --cflags --libs nf4) -ldl" */
#include <nf4/nf4.h>
#include <string.h>

#include "cuda_driver.h"

enum { ROWS = 512, COLS = 1376, SKIPPED = 77 };

/* A weight's parts, in host or device memory. */
typedef struct {
  nf4_tensor tensor;
  nf4_sizes sizes;
  size_t workspace_bytes;
  void *workspace;
} Weight;

static void nf4_check(nf4_status status) {
  if (status == NF4_STATUS_OK) return;
  fprintf(stderr, "%s: %s\n", nf4_status_string(status), nf4_last_error());
  exit(1);
}

static void *host_alloc(int64_t bytes) {
  void *memory = malloc((size_t)bytes);
  if (memory == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return memory;
}

static void *device_alloc(int64_t bytes) {
  CUdeviceptr memory = 0;
  cuda_check(cuMemAlloc(&memory, (size_t)bytes));
  return (void *)(uintptr_t)memory;
}

static void device_free(void *memory) { cuda_check(cuMemFree((CUdeviceptr)(uintptr_t)memory)); }

static void upload(void *device, const void *host, int64_t bytes) {
  copy_to_device((CUdeviceptr)(uintptr_t)device, host, (size_t)bytes);
}

/* A double-quantized NF4 weight whose parts come from `allocate`; nested_code is the caller's. */
static Weight make_weight(void *(*allocate)(int64_t), const float *nested_code) {
  Weight w = {.tensor = {.struct_size = sizeof(nf4_tensor),
                         .format = NF4_FORMAT_NF4,
                         .blocksize = 64,
                         .nested_blocksize = 256,
                         .rows = ROWS,
                         .cols = COLS},
              .sizes = {.struct_size = sizeof(nf4_sizes)}};
  nf4_check(nf4_tensor_sizes(&w.tensor, &w.sizes));
  nf4_check(nf4_quantize_workspace_size(&w.tensor, &w.workspace_bytes));
  w.tensor.packed = allocate(w.sizes.packed_bytes);
  w.tensor.absmax = allocate(w.sizes.absmax_bytes);
  w.tensor.nested_absmax = allocate(w.sizes.nested_blocks * 4);
  w.tensor.nested_offset = allocate(4);
  w.tensor.nested_code = nested_code;
  w.workspace = allocate((int64_t)w.workspace_bytes);
  return w;
}

static void free_weight(const Weight *w, void (*release)(void *)) {
  release(w->tensor.packed);
  release(w->tensor.absmax);
  release(w->tensor.nested_absmax);
  release(w->tensor.nested_offset);
  release(w->workspace);
}

/* Returns how many bytes of `device` differ from those of `host`. */
static int64_t differences(const char *what, const void *device, const void *host, int64_t bytes) {
  unsigned char *copy = host_alloc(bytes);
  int64_t count = 0;
  cuda_check(cuMemcpyDtoH(copy, (CUdeviceptr)(uintptr_t)device, (size_t)bytes));
  for (int64_t i = 0; i < bytes; ++i) count += copy[i] != ((const unsigned char *)host)[i];
  printf("%-8s %8lld bytes, %lld differ from the CPU's\n", what, (long long)bytes,
         (long long)count);
  free(copy);
  return count;
}

int main(void) {
  nf4_device info = {.struct_size = sizeof info};
  const nf4_status usable = nf4_device_info(0, &info);
  if (usable == NF4_STATUS_NO_CUDA || usable == NF4_STATUS_NO_DEVICE ||
      usable == NF4_STATUS_UNSUPPORTED_DEVICE) {
    printf("skipped: %s\n", nf4_last_error());
    return SKIPPED;
  }
  nf4_check(usable);
  printf("%s, kernels %s\n", info.name, info.dequant_variant);

  /* The primary context is the one that the CUDA runtime, and so libnf4, works in. */
  CUcontext context = NULL;
  CUstream stream = NULL;
  cuda_driver_load();
  cuda_check(cuInit(0));
  cuda_check(cuDevicePrimaryCtxRetain(&context, 0));
  cuda_check(cuCtxSetCurrent(context));
  cuda_check(cuStreamCreate(&stream, 1 /* does not wait for the default stream */));

  const Weight host = make_weight(host_alloc, nf4_scale_code());
  const int64_t dense_bytes = host.sizes.elements * 4, out_bytes = host.sizes.elements * 2;
  float *dense = host_alloc(dense_bytes);
  void *out = host_alloc(out_bytes);
  for (int64_t i = 0; i < host.sizes.elements; ++i)
    dense[i] = (float)(rand() - RAND_MAX / 2) / (float)RAND_MAX;
  nf4_check(nf4_quantize_cpu(dense, NF4_DTYPE_FP32, &host.tensor, host.workspace,
                             host.workspace_bytes, 0));
  nf4_check(nf4_dequant_cpu(&host.tensor, out, NF4_DTYPE_FP16, 0));

  float *nested_code = device_alloc(256 * 4);
  upload(nested_code, nf4_scale_code(), 256 * 4);
  const Weight device = make_weight(device_alloc, nested_code);
  void *device_dense = device_alloc(dense_bytes), *device_out = device_alloc(out_bytes);
  upload(device_dense, dense, dense_bytes);

  /* Both launches return at once; the stream runs them in order. */
  nf4_check(nf4_quantize_launch(device_dense, NF4_DTYPE_FP32, &device.tensor, device.workspace,
                                device.workspace_bytes, stream));
  nf4_check(nf4_dequant_launch(&device.tensor, device_out, NF4_DTYPE_FP16, stream));
  cuda_check(cuStreamSynchronize(stream));

  int64_t wrong = 0;
  wrong += differences("packed", device.tensor.packed, host.tensor.packed, host.sizes.packed_bytes);
  wrong += differences("absmax", device.tensor.absmax, host.tensor.absmax, host.sizes.absmax_bytes);
  wrong += differences("values", device_out, out, out_bytes);

  device_free(device_out);
  device_free(device_dense);
  free_weight(&device, device_free);
  device_free(nested_code);
  cuda_check(cuStreamDestroy(stream));
  cuda_check(cuDevicePrimaryCtxRelease(0));
  free(out);
  free(dense);
  free_weight(&host, free);
  return wrong == 0 ? 0 : 1;
}
