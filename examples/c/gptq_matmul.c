/* Computes y = x W^T for a weight in GPTQ's layout (qweight, qzeros and scales): in host memory
 * and, if there is a GPU, in raw GPU memory on a stream of the caller. Compares with the
 * dequantized weight.
 *
 *   eval "cc gptq_matmul.c $(pkg-config --cflags --libs nf4) -ldl -lm" */
#include <math.h>
#include <nf4/nf4.h>
#include <string.h>

#include "cuda_driver.h"

enum { ROWS = 512, COLS = 1024, GROUP_SIZE = 128, M = 3 };

static void check(nf4_status status) {
  if (status == NF4_STATUS_OK) return;
  fprintf(stderr, "%s: %s\n", nf4_status_string(status), nf4_last_error());
  exit(1);
}

static void *allocate(int64_t bytes) {
  void *memory = malloc((size_t)bytes);
  if (memory == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return memory;
}

/* Returns GPU memory with the bytes of `host`; if that is NULL, the memory is not initialized. */
static void *on_device(const void *host, int64_t bytes) {
  CUdeviceptr memory = 0;
  cuda_check(cuMemAlloc(&memory, (size_t)bytes));
  if (host != NULL) copy_to_device(memory, host, (size_t)bytes);
  return (void *)(uintptr_t)memory;
}

static float from_bf16(uint16_t bits) {
  const uint32_t word = (uint32_t)bits << 16;
  float number;
  memcpy(&number, &word, sizeof number);
  return number;
}

/* Returns what a GPTQ v1 checkpoint has: qweight [COLS / 8][ROWS], qzeros [groups][ROWS / 8] and
 * scales [groups][ROWS] in bf16. The weight is made of random numbers by rounding to nearest. */
static nf4_int4_tensor random_weight(nf4_int4_sizes *sizes) {
  nf4_int4_tensor weight = {.struct_size = sizeof weight,
                            .layout = NF4_INT4_GPTQ,
                            .scales_dtype = NF4_DTYPE_BF16,
                            .group_size = GROUP_SIZE,
                            .zero_offset = 1,
                            .rows = ROWS,
                            .cols = COLS};
  check(nf4_int4_tensor_sizes(&weight, sizes));
  weight.packed = allocate(sizes->packed_bytes);
  weight.scales = allocate(sizes->scales_bytes);
  weight.zeros = allocate(sizes->zeros_bytes);
  float *numbers = allocate(ROWS * COLS * (int64_t)sizeof(float));
  for (int64_t i = 0; i < ROWS * COLS; ++i)
    numbers[i] = (float)(rand() - RAND_MAX / 2) / (float)RAND_MAX;
  check(nf4_int4_quantize_cpu(numbers, NF4_DTYPE_FP32, &weight, /*symmetric=*/0, 0));
  free(numbers);
  return weight;
}

static nf4_matmul_args product(const void *x, void *y) {
  return (nf4_matmul_args){.struct_size = sizeof(nf4_matmul_args),
                           .dtype = NF4_DTYPE_BF16,
                           .m = M,
                           .x = x,
                           .x_stride = COLS,
                           .y = y,
                           .y_stride = ROWS};
}

/* ||y - x W^T|| / ||x W^T|| */
static double error_of(const float *dense, const uint16_t *x, const uint16_t *y) {
  double off = 0, size = 0;
  for (int64_t i = 0; i < M; ++i)
    for (int64_t row = 0; row < ROWS; ++row) {
      double sum = 0;
      for (int64_t k = 0; k < COLS; ++k) sum += from_bf16(x[i * COLS + k]) * dense[row * COLS + k];
      const double difference = from_bf16(y[i * ROWS + row]) - sum;
      off += difference * difference;
      size += sum * sum;
    }
  return sqrt(off / size);
}

static void multiply_on_gpu(nf4_int4_tensor weight, const nf4_int4_sizes *sizes, const void *x,
                            uint16_t *y) {
  CUcontext context = NULL;
  CUstream stream = NULL;
  cuda_driver_load();
  cuda_check(cuInit(0));
  cuda_check(cuDevicePrimaryCtxRetain(&context, 0));
  cuda_check(cuCtxSetCurrent(context));
  cuda_check(cuStreamCreate(&stream, 1 /* does not wait for the default stream */));
  const int64_t y_bytes = M * ROWS * 2;
  weight.packed = on_device(weight.packed, sizes->packed_bytes);
  weight.scales = on_device(weight.scales, sizes->scales_bytes);
  weight.zeros = on_device(weight.zeros, sizes->zeros_bytes);
  const nf4_matmul_args args = product(on_device(x, M * COLS * 2), on_device(NULL, y_bytes));
  size_t bytes = 0;
  check(nf4_int4_matmul_workspace_size(&weight, &args, &bytes));
  void *workspace = bytes > 0 ? on_device(NULL, (int64_t)bytes) : NULL;

  check(nf4_int4_matmul_launch(&weight, &args, workspace, bytes, stream));
  cuda_check(cuStreamSynchronize(stream));
  cuda_check(cuMemcpyDtoH(y, (CUdeviceptr)(uintptr_t)args.y, (size_t)y_bytes));
  cuda_check(cuStreamDestroy(stream));
  cuda_check(cuDevicePrimaryCtxRelease(0)); /* and with it all of its memory */
}

int main(void) {
  nf4_int4_sizes sizes = {.struct_size = sizeof sizes};
  const nf4_int4_tensor weight = random_weight(&sizes);
  float *dense = allocate(ROWS * COLS * (int64_t)sizeof(float));
  check(nf4_int4_dequant_cpu(&weight, dense, NF4_DTYPE_FP32, 0));
  uint16_t *x = allocate(M * COLS * 2), *y = allocate(M * ROWS * 2);
  for (int i = 0; i < M * COLS; ++i) x[i] = (uint16_t)(0x3f00 + rand() % 256); /* 0.5 to 2 */

  const nf4_matmul_args args = product(x, y);
  check(nf4_int4_matmul_cpu(&weight, &args, 0));
  double worst = error_of(dense, x, y);
  printf("libnf4 %s, CPU kernels %s: relative error %.1e\n", nf4_version_string(),
         nf4_cpu_variant(), worst);

  nf4_device info = {.struct_size = sizeof info};
  if (nf4_device_info(0, &info) == NF4_STATUS_OK) {
    multiply_on_gpu(weight, &sizes, x, y);
    const double error = error_of(dense, x, y);
    printf("%s: relative error %.1e\n", info.name, error);
    if (!(error <= worst)) worst = error;
  } else {
    printf("no GPU: %s\n", nf4_last_error());
  }
  free(y);
  free(x);
  free(dense);
  free(weight.zeros);
  free(weight.scales);
  free(weight.packed);
  return worst < 4e-3 ? 0 : 1; /* y is rounded to 8 bits; false for NaN, too */
}
