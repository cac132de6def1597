/* Tests mistralrs_dequantize.h: first which arguments its functions refuse, then, on a GPU, whether
 * their values are those of the CPU. Exits with 77 if there is no GPU for the second part. With the
 * argument "host" the program ends after the first part.
 *
 *   eval "cc mistralrs.c $(pkg-config --cflags --libs nf4) -ldl" */
#include <string.h>

#include "cuda_driver.h"

static char refused[256];
#define NF4_MISTRALRS_FAILED(words) ((void)snprintf(refused, sizeof refused, "%s", words))
#include "mistralrs_dequantize.h"

enum { N = 64 * 331 + 5, BLOCKSIZE = 64, BLOCKS = (N + BLOCKSIZE - 1) / BLOCKSIZE, SKIPPED = 77 };

typedef void (*Dequantize)(const float *, const uint8_t *, const float *, void *, int32_t, int32_t,
                           nf4_stream);

static const struct {
  const char *name;
  Dequantize function;
  nf4_format format;
  nf4_dtype dtype;
  size_t bytes;
} cases[] = {
    {"f32 NF4", dequantize_blockwise_f32_nf4, NF4_FORMAT_NF4, NF4_DTYPE_FP32, 4},
    {"f16 NF4", dequantize_blockwise_f16_nf4, NF4_FORMAT_NF4, NF4_DTYPE_FP16, 2},
    {"bf16 NF4", dequantize_blockwise_bf16_nf4, NF4_FORMAT_NF4, NF4_DTYPE_BF16, 2},
    {"f32 FP4", dequantize_blockwise_f32_fp4, NF4_FORMAT_FP4, NF4_DTYPE_FP32, 4},
    {"f16 FP4", dequantize_blockwise_f16_fp4, NF4_FORMAT_FP4, NF4_DTYPE_FP16, 2},
    {"bf16 FP4", dequantize_blockwise_bf16_fp4, NF4_FORMAT_FP4, NF4_DTYPE_BF16, 2},
};
enum { CASES = sizeof cases / sizeof *cases };

static uint8_t codes[(N + 1) / 2];
static float absmax[BLOCKS], wanted[N], found[N];

/* Returns whether a call was refused with these words. An empty string means: not refused. */
static int said(const char *name, const char *words) {
  const int right = words[0] == '\0' ? refused[0] == '\0' : strstr(refused, words) != NULL;
  if (!right) fprintf(stderr, "%s: expected \"%s\", not \"%s\"\n", name, words, refused);
  refused[0] = '\0';
  return right;
}

/* Checks that each argument reaches libnf4 in its place. */
static int check_arguments(void) {
  int right = 1;
  for (int i = 0; i < CASES; ++i) {
    const Dequantize dequantize = cases[i].function;
    dequantize(NULL, NULL, NULL, NULL, BLOCKSIZE, 0, NULL);
    right &= said(cases[i].name, "");
    dequantize(NULL, codes, absmax, found, 63, N, NULL);
    right &= said(cases[i].name, "blocksize is 63");
    dequantize(NULL, codes, absmax, found, BLOCKSIZE, -1, NULL);
    right &= said(cases[i].name, "cols is -1");
    dequantize(NULL, NULL, absmax, found, BLOCKSIZE, N, NULL);
    right &= said(cases[i].name, "packed is NULL");
    dequantize(NULL, codes, NULL, found, BLOCKSIZE, N, NULL);
    right &= said(cases[i].name, "absmax is NULL");
    dequantize(NULL, codes, absmax, NULL, BLOCKSIZE, N, NULL);
    right &= said(cases[i].name, "out is NULL");
  }
  return right;
}

static CUdeviceptr upload(const void *values, size_t bytes) {
  CUdeviceptr memory = 0;
  cuda_check(cuMemAlloc(&memory, bytes));
  copy_to_device(memory, values, bytes);
  return memory;
}

static int check_values(void) {
  CUcontext context = NULL;
  CUstream stream = NULL;
  int right = 1;
  cuda_driver_load();
  cuda_check(cuInit(0));
  cuda_check(cuDevicePrimaryCtxRetain(&context, 0));
  cuda_check(cuCtxSetCurrent(context));
  cuda_check(cuStreamCreate(&stream, 1 /* does not wait for the default stream */));
  const CUdeviceptr a = upload(codes, sizeof codes), scales = upload(absmax, sizeof absmax);
  const CUdeviceptr out = upload(found, sizeof found);
  for (int i = 0; i < CASES; ++i) {
    nf4_tensor weight = {.struct_size = sizeof weight,
                         .format = cases[i].format,
                         .blocksize = BLOCKSIZE,
                         .rows = 1,
                         .cols = N,
                         .packed = codes,
                         .absmax = absmax};
    if (nf4_dequant_cpu(&weight, wanted, cases[i].dtype, 1) != NF4_STATUS_OK) {
      fprintf(stderr, "%s: %s\n", cases[i].name, nf4_last_error());
      return 0;
    }
    cases[i].function(NULL, (const uint8_t *)(uintptr_t)a, (const float *)(uintptr_t)scales,
                      (void *)(uintptr_t)out, BLOCKSIZE, N, stream);
    right &= said(cases[i].name, "");
    cuda_check(cuStreamSynchronize(stream));
    cuda_check(cuMemcpyDtoH(found, out, sizeof found));
    const int same = memcmp(found, wanted, N * cases[i].bytes) == 0;
    printf("%s: %s\n", cases[i].name, same ? "the bits of the CPU" : "WRONG");
    right &= same;
  }
  cuda_check(cuMemFree(a));
  cuda_check(cuMemFree(scales));
  cuda_check(cuMemFree(out));
  cuda_check(cuStreamDestroy(stream));
  cuda_check(cuDevicePrimaryCtxRelease(0));
  return right;
}

int main(int count, char **arguments) {
  for (size_t i = 0; i < sizeof codes; ++i) codes[i] = (uint8_t)rand();
  for (int i = 0; i < BLOCKS; ++i) absmax[i] = (float)(1 + i % 7) * 0.11f;
  if (!check_arguments()) return 1;
  if (count > 1 && strcmp(arguments[1], "host") == 0) return 0;
  nf4_device info = {.struct_size = sizeof info};
  if (nf4_device_info(0, &info) != NF4_STATUS_OK) {
    printf("skipped: %s\n", nf4_last_error());
    return SKIPPED;
  }
  return check_values() ? 0 : 1;
}
