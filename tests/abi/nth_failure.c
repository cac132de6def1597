/* The n-th allocation fails, or the n-th thread cannot be started, for every n until none is left
 * that could: each call returns what it always does, but for the text of an error, and nothing
 * leaks. A child each, which begins without threads. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nf4/nf4.h"

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *memory, size_t bytes);
extern void __libc_free(void *memory);
enum { kRows = 2048, kCols = 512, kThreads = 5, kExperts = 4, kMost = 1000, kCalls = 15 };
enum { kElements = kRows * kCols, kBlocks = kElements / 64, kGroup = 128 };

enum kind { kNone, kAllocation, kThread };

/* Shared with the children. */
static struct shared {
  uint64_t expected[kCalls]; /* of a child where nothing fails */
  int faults;
} *shared;

static enum kind armed;
static int countdown, seen, live;

static bool fails(enum kind kind) {
  if (armed != kind) return false;
  __atomic_add_fetch(&seen, 1, __ATOMIC_RELAXED);
  return __atomic_sub_fetch(&countdown, 1, __ATOMIC_RELAXED) == 0;
}
static void *counted(void *memory) {
  if (memory != NULL) __atomic_add_fetch(&live, 1, __ATOMIC_RELAXED);
  return memory;
}
static void *refuse(void) {
  errno = ENOMEM;
  return NULL;
}

void *malloc(size_t bytes) { return fails(kAllocation) ? refuse() : counted(__libc_malloc(bytes)); }
void *calloc(size_t count, size_t bytes) {
  return fails(kAllocation) ? refuse() : counted(__libc_calloc(count, bytes));
}
void *realloc(void *memory, size_t bytes) {
  if (fails(kAllocation)) return refuse();
  void *const moved = __libc_realloc(memory, bytes);
  return memory == NULL ? counted(moved) : moved;
}
void free(void *memory) {
  if (memory != NULL) __atomic_sub_fetch(&live, 1, __ATOMIC_RELAXED);
  __libc_free(memory);
}
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *argument) {
  static __typeof__(&pthread_create) system;
  if (fails(kThread)) return EAGAIN;
  if (system == NULL) *(void **)&system = dlsym(RTLD_NEXT, "pthread_create");
  return system(thread, attributes, run, argument);
}

static uint16_t dense[kElements], out[kElements], x[8 * kRows], y[8 * kRows], gradient[8 * kCols];
static uint8_t packed[kElements / 2], absmax[kBlocks], codes[kElements / 2], scales[kElements / 64];
static float nested_absmax[kBlocks], nested_offset, flat_absmax[kBlocks];
static uint64_t workspace[2 * kBlocks];
static uint8_t sorted[kElements / 2];
static int32_t group_of[kCols], permutation[kCols];
static const int32_t ends[kExperts] = {1, 3, 3, 8};

static uint64_t hash_of(const void *data, size_t bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3;
  return hash;
}

/* Every function of the CPU, quantize both nested and flat. What each wrote, or a number that no
 * hash is likely to be if it failed. */
static void call_all(uint64_t results[kCalls]) {
  const nf4_tensor nested = {.struct_size = sizeof nested,
                             .format = NF4_FORMAT_NF4,
                             .blocksize = 64,
                             .nested_blocksize = 256,
                             .rows = kRows,
                             .cols = kCols,
                             .packed = packed,
                             .absmax = absmax,
                             .nested_absmax = nested_absmax,
                             .nested_code = nf4_scale_code(),
                             .nested_offset = &nested_offset};
  nf4_tensor flat = nested;
  flat.nested_blocksize = 0;
  flat.packed = codes;
  flat.absmax = flat_absmax;
  flat.nested_absmax = flat.nested_offset = NULL;
  flat.nested_code = NULL;
  const nf4_matmul_args args = {.struct_size = sizeof args,
                                .dtype = NF4_DTYPE_BF16,
                                .m = 8,
                                .x = x,
                                .x_stride = kCols,
                                .y = y,
                                .y_stride = kRows};
  nf4_matmul_args back = args;
  back.x_stride = kRows;
  back.y = gradient;
  back.y_stride = kCols;
  nf4_matmul_args batch[2] = {args, args};
  batch[0].m = batch[1].m = 4;
  batch[1].y = y + 4 * kRows;
  const nf4_tensor *const weights[2] = {&nested, &flat};
  const nf4_grouped_args grouped = {.struct_size = sizeof grouped,
                                    .dtype = NF4_DTYPE_BF16,
                                    .experts = kExperts,
                                    .m = 8,
                                    .x = x,
                                    .x_stride = kCols,
                                    .x_rows = 8,
                                    .y = y,
                                    .y_stride = kRows / kExperts,
                                    .ends = ends};
  nf4_grouped_args grouped_back = grouped;
  grouped_back.x_stride = kRows;
  grouped_back.y = gradient;
  grouped_back.y_stride = kCols;
  const nf4_int4_tensor integers = {.struct_size = sizeof integers,
                                    .layout = NF4_INT4_COMPRESSED_TENSORS,
                                    .scales_dtype = NF4_DTYPE_FP16,
                                    .group_size = kGroup,
                                    .rows = kRows,
                                    .cols = kCols,
                                    .packed = codes,
                                    .scales = scales};
  const nf4_int4_tensor *const both[2] = {&integers, &integers};
  nf4_int4_tensor expert = integers, act_order = integers, reordered = integers;
  expert.rows = kRows / kExperts;
  act_order.g_idx = group_of;
  reordered.packed = sorted;
  reordered.permutation = permutation;
  const nf4_dtype bf16 = NF4_DTYPE_BF16;
  const nf4_lora_grad_args adapter = {.struct_size = sizeof adapter,
                                      .dtype = bf16,
                                      .grad_dtype = bf16,
                                      .rank = 8,
                                      .scale = 1,
                                      .m = kRows,
                                      .rows = kCols,
                                      .cols = kCols,
                                      .x = dense,
                                      .x_stride = kCols,
                                      .dy = dense,
                                      .dy_stride = kCols,
                                      .p = x,
                                      .q = x,
                                      .da = y,
                                      .da_stride = kCols,
                                      .db = y + 8 * kCols,
                                      .db_stride = 8};
  int at = 0;
#define CALL(call, data, bytes) \
  results[at] = (call) == NF4_STATUS_OK ? hash_of(data, bytes) : 0, ++at
  CALL(nf4_quantize_cpu(dense, bf16, &nested, workspace, sizeof workspace, kThreads), packed,
       sizeof packed);
  CALL(nf4_quantize_cpu(dense, bf16, &flat, NULL, 0, kThreads), codes, sizeof codes);
  CALL(nf4_dequant_cpu(&nested, out, bf16, kThreads), out, sizeof out);
  CALL(nf4_matmul_cpu(&nested, &args, kThreads), y, sizeof y);
  CALL(nf4_matmul_grad_cpu(&nested, &back, kThreads), gradient, sizeof gradient);
  CALL(nf4_lora_grad_cpu(&adapter, kThreads), y, 2 * 8 * kCols * sizeof *y);
  CALL(nf4_matmul_batch_cpu(weights, batch, 2, kThreads), y, sizeof y);
  CALL(nf4_matmul_grouped_cpu(&nested, &grouped, kThreads), y, 8 * kRows / kExperts * 2);
  CALL(nf4_int4_quantize_cpu(dense, bf16, &integers, 1, kThreads), codes, sizeof codes);
  CALL(nf4_matmul_grouped_grad_cpu(&nested, &grouped_back, kThreads), gradient, sizeof gradient);
  CALL(nf4_int4_dequant_cpu(&integers, out, bf16, kThreads), out, sizeof out);
  CALL(nf4_int4_reorder_cpu(&act_order, &reordered, kThreads), sorted, sizeof sorted);
  CALL(nf4_int4_matmul_cpu(&integers, &args, kThreads), y, sizeof y);
  CALL(nf4_int4_matmul_batch_cpu(both, batch, 2, kThreads), y, sizeof y);
  CALL(nf4_int4_matmul_grouped_cpu(&expert, &grouped, kThreads), y, 8 * kRows / kExperts * 2);
#undef CALL
}

/* In a thread of its own, as what a thread keeps of its last error is freed at its end. */
static void *fail_once(void *unused) {
  (void)unused;
  const bool refused = nf4_tensor_sizes(NULL, NULL) == NF4_STATUS_INVALID_ARGUMENT;
  return nf4_last_error()[0] != '\0' && refused ? &live : NULL;
}

static void check(bool passed, const char *what, enum kind kind, int n) {
  if (passed) return;
  ++shared->faults;
  fprintf(stderr, "failed: %s (%s %d)\n", what, kind == kThread ? "thread" : "allocation", n);
}

static void call_and_compare(enum kind kind, int n) {
  uint64_t results[kCalls];
  call_all(results);
  check(memcmp(results, shared->expected, sizeof results) == 0, "the results", kind, n);
}

/* In a child. Returns whether anything failed. */
static bool run(enum kind kind, int n) {
  pthread_t thread;
  countdown = n;
  armed = kind;
  call_and_compare(kind, n);
  const bool error_told = fail_once(NULL) != NULL;
  armed = kNone;
  const bool hit = seen >= n;
  check(error_told, "an error without its text", kind, n);
  call_and_compare(kind, n);
  int before = 0;
  for (int i = 0; i < 4; ++i) {
    void *result = NULL;
    if (pthread_create(&thread, NULL, fail_once, NULL) != 0) continue;
    pthread_join(thread, &result);
    check(result != NULL, "an error of another thread", kind, n);
    call_and_compare(kind, n);
    if (i == 1) before = live; /* the C library keeps the stacks of threads that have ended */
  }
  check(live <= before, "allocations are left", kind, n);
  return hit;
}

/* How many could fail. */
static int fail_each(enum kind kind) {
  for (int n = 1; n < kMost; ++n) {
    const pid_t child = fork();
    if (child == 0) _exit(run(kind, n) ? 1 : 0);
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) exit(2);
    check(WIFEXITED(status), "the process ended", kind, n);
    if (!WIFEXITED(status) || WEXITSTATUS(status) == 0) return n - 1;
  }
  return kMost;
}

/* For docs/reliability.md. */
static void count(const char *proof, int of) {
  const char *const path = getenv("NF4_PROOFS");
  FILE *const file = path != NULL ? fopen(path, "a") : NULL;
  if (file == NULL) return;
  fprintf(file, "%s %d\n", proof, of);
  fclose(file);
}

int main(void) {
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  for (int i = 0; i < kElements; ++i) dense[i] = (uint16_t)(0x3f00 + (i * 7 & 0x80ff));
  for (int i = 0; i < kCols; ++i) group_of[i] = i % (kCols / kGroup);
  for (int i = 0; i < 8 * kRows; ++i) x[i] = (uint16_t)(0x3f80 + i % 128); /* 1 to 2 */
  const pid_t child = fork();
  if (child == 0) {
    call_all(shared->expected);
    _exit(0);
  }
  if (child < 0 || waitpid(child, NULL, 0) != child) return 2;
  for (int i = 0; i < kCalls; ++i) check(shared->expected[i] != 0, "a call", kNone, i);
  const int allocations = fail_each(kAllocation), threads = fail_each(kThread);
  printf("%d allocations and %d threads failed, %d faults\n", allocations, threads, shared->faults);
  check(allocations > 0 && threads >= kThreads - 1, "too few could fail", kNone, 0);
  if (shared->faults != 0) return 1;
  count("nth-allocation", allocations);
  count("nth-thread", threads);
  return 0;
}
