/* Where malloc fails, a dlopened libnf4 returns: what a thread needs of its own is not allocated
 * at first use, as thread-local memory would be, for which the C library aborts the process. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nf4/nf4.h"

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *memory, size_t bytes);

static volatile bool refused;

static void *refuse(void) {
  errno = ENOMEM;
  return NULL;
}
void *malloc(size_t bytes) { return refused ? refuse() : __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) {
  return refused ? refuse() : __libc_calloc(count, bytes);
}
void *realloc(void *memory, size_t bytes) {
  return refused ? refuse() : __libc_realloc(memory, bytes);
}

enum { kRows = 8192, kCols = 512, kThreads = 3, kProducts = 2 };
enum { kElements = kRows * kCols, kBlocks = kElements / 64, kNestedBlocks = kBlocks / 256 };

static __typeof__(&nf4_last_error) last_error;
static __typeof__(&nf4_tensor_sizes) tensor_sizes;
static __typeof__(&nf4_dequant_cpu) dequant_cpu;
static __typeof__(&nf4_quantize_cpu) quantize_cpu;
static __typeof__(&nf4_matmul_cpu) matmul_cpu;
static __typeof__(&nf4_matmul_batch_cpu) matmul_batch_cpu;
static __typeof__(&nf4_scale_code) scale_code;

static sem_t loaded;
static uint8_t packed[kElements / 2];
static float absmax[kBlocks], codebook[16];
static uint16_t x[kCols];
static uint8_t workspace[8 * kBlocks] __attribute__((aligned(16)));

/* What the library gives back. */
static struct results {
  nf4_status dequantized, quantized, multiplied, multiplied_batch;
  uint16_t dense[kElements];
  uint8_t packed[kElements / 2], absmax[kBlocks];
  float nested_absmax[kNestedBlocks], nested_offset;
  uint16_t y[kRows], y_of_batch[kProducts][kRows];
} without_memory, with_memory;

static int faults;
static void check(bool passed, const char *what) {
  if (passed) return;
  ++faults;
  fprintf(stderr, "failed: %s\n", what);
}

static void call_all(struct results *results) {
  const nf4_tensor weight = {.struct_size = sizeof weight,
                             .format = NF4_FORMAT_NF4,
                             .blocksize = 64,
                             .rows = kRows,
                             .cols = kCols,
                             .packed = packed,
                             .absmax = absmax,
                             .codebook = codebook};
  nf4_tensor nested = weight;
  nested.nested_blocksize = 256;
  nested.packed = results->packed;
  nested.absmax = results->absmax;
  nested.nested_absmax = results->nested_absmax;
  nested.nested_code = (float *)scale_code();
  nested.nested_offset = &results->nested_offset;
  const nf4_matmul_args args = {.struct_size = sizeof args,
                                .dtype = NF4_DTYPE_BF16,
                                .m = 1,
                                .x = x,
                                .x_stride = kCols,
                                .y = results->y,
                                .y_stride = kRows};
  const nf4_tensor *weights[kProducts];
  nf4_matmul_args products[kProducts];
  for (int i = 0; i < kProducts; ++i) {
    weights[i] = i == 0 ? &weight : &nested;
    products[i] = args;
    products[i].y = results->y_of_batch[i];
  }
  results->dequantized = dequant_cpu(&weight, results->dense, NF4_DTYPE_BF16, kThreads);
  results->quantized =
      quantize_cpu(results->dense, NF4_DTYPE_BF16, &nested, workspace, sizeof workspace, kThreads);
  results->multiplied = matmul_cpu(&weight, &args, kThreads);
  results->multiplied_batch = matmul_batch_cpu(weights, products, kProducts, kThreads);
}

/* The work of a thread that was there before the library. */
static void *work(void *unused) {
  (void)unused;
  sem_wait(&loaded);
  refused = true;
  const nf4_status bad = tensor_sizes(NULL, NULL);
  char detail[100];
  strncpy(detail, last_error(), sizeof detail - 1);
  call_all(&without_memory);
  refused = false;

  check(bad == NF4_STATUS_INVALID_ARGUMENT, "a bad argument is told by the status");
  check(strstr(detail, "no memory") != NULL, "the detail says that there was no memory");
  check(without_memory.dequantized == NF4_STATUS_OK, "dequantize works");
  check(without_memory.quantized == NF4_STATUS_OK, "quantize works");
  check(without_memory.multiplied == NF4_STATUS_OK, "matmul works");
  check(without_memory.multiplied_batch == NF4_STATUS_OK, "several products work");
  call_all(&with_memory);
  check(memcmp(&without_memory, &with_memory, sizeof with_memory) == 0,
        "the results are those with memory");
  check(with_memory.y[1] != 0 && with_memory.y_of_batch[1][1] != 0, "and are not all zero");
  check(tensor_sizes(NULL, NULL) == NF4_STATUS_INVALID_ARGUMENT, "later failures are told");
  check(strstr(last_error(), "nf4_tensor") != NULL, "and have their detail");
  return NULL;
}

static void *find(void *library, const char *name) {
  void *const symbol = dlsym(library, name);
  if (symbol == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return symbol;
}

int main(int count, char **arguments) {
  if (count != 2) return 2;
  pthread_t thread;
  if (sem_init(&loaded, 0, 0) != 0 || pthread_create(&thread, NULL, work, NULL) != 0) return 2;
  void *const library = dlopen(arguments[1], RTLD_NOW);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  *(void **)&last_error = find(library, "nf4_last_error");
  *(void **)&tensor_sizes = find(library, "nf4_tensor_sizes");
  *(void **)&dequant_cpu = find(library, "nf4_dequant_cpu");
  *(void **)&quantize_cpu = find(library, "nf4_quantize_cpu");
  *(void **)&matmul_cpu = find(library, "nf4_matmul_cpu");
  *(void **)&matmul_batch_cpu = find(library, "nf4_matmul_batch_cpu");
  *(void **)&scale_code = find(library, "nf4_scale_code");
  for (int i = 0; i < 16; ++i) codebook[i] = (float)(i - 8) / 7;
  for (int i = 0; i < kElements / 2; ++i) packed[i] = (uint8_t)(i * 31 + (i >> 8));
  for (int i = 0; i < kBlocks; ++i) absmax[i] = (float)(1 + i % 97) / 97;
  for (int i = 0; i < kCols; ++i) x[i] = (uint16_t)(0x3f80 + i % 128); /* 1 to 2 */
  sem_post(&loaded);
  pthread_join(thread, NULL);
  return faults != 0;
}
