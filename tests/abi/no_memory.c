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

enum { kRows = 8192, kCols = 512, kThreads = 3 };

static __typeof__(&nf4_last_error) last_error;
static __typeof__(&nf4_tensor_sizes) tensor_sizes;
static __typeof__(&nf4_dequant_cpu) dequant_cpu;
static __typeof__(&nf4_matmul_cpu) matmul_cpu;

static sem_t loaded;
static uint8_t packed[kRows * kCols / 2];
static float absmax[kRows * kCols / 64], codebook[16];
static uint16_t dense[kRows * kCols], x[kCols], y[kRows];

static int faults;
static void check(bool passed, const char *what) {
  if (passed) return;
  ++faults;
  fprintf(stderr, "failed: %s\n", what);
}

/* The work of a thread that was there before the library. */
static void *work(void *unused) {
  (void)unused;
  sem_wait(&loaded);
  const nf4_tensor weight = {.struct_size = sizeof weight,
                             .format = NF4_FORMAT_NF4,
                             .blocksize = 64,
                             .rows = kRows,
                             .cols = kCols,
                             .packed = packed,
                             .absmax = absmax,
                             .codebook = codebook};
  const nf4_matmul_args args = {.struct_size = sizeof args,
                                .dtype = NF4_DTYPE_BF16,
                                .m = 1,
                                .x = x,
                                .x_stride = kCols,
                                .y = y,
                                .y_stride = kRows};
  refused = true;
  const nf4_status bad = tensor_sizes(NULL, NULL);
  char without_memory[100];
  strncpy(without_memory, last_error(), sizeof without_memory - 1);
  const nf4_status dequantized = dequant_cpu(&weight, dense, NF4_DTYPE_BF16, kThreads);
  const nf4_status multiplied = matmul_cpu(&weight, &args, kThreads);
  refused = false;

  check(bad == NF4_STATUS_INVALID_ARGUMENT, "a bad argument is told by the status");
  check(strstr(without_memory, "no memory") != NULL, "the detail says that there was no memory");
  check(dequantized == NF4_STATUS_OK, "dequantize works");
  check(multiplied == NF4_STATUS_OK, "matmul works");
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
  *(void **)&matmul_cpu = find(library, "nf4_matmul_cpu");
  for (int i = 0; i < 16; ++i) codebook[i] = (float)(i - 8) / 7;
  sem_post(&loaded);
  pthread_join(thread, NULL);
  return faults != 0;
}
