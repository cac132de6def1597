/* A program of 0.1, as its users have them: built against the frozen nf4.h beside it and linked
 * with libnf4.so.0 of its day, it runs on today's library and gets the same answers
 * (tests/abi/frozen.py). It calls every function. All numbers are exact in any order of summing, on
 * every machine. */
#include <nf4/nf4.h>
#include <stdio.h>
#include <string.h>

enum { ROWS = 4, COLS = 64, EXPERTS = 2, GROUPS = 2, ALL = ROWS * COLS };

static int checks, failures;

#define CHECK(condition)                                                    \
  do {                                                                      \
    ++checks;                                                               \
    if (!(condition)) {                                                     \
      ++failures;                                                           \
      printf("line %d: %s (%s)\n", __LINE__, #condition, nf4_last_error()); \
    }                                                                       \
  } while (0)
#define OK(call) CHECK((call) == NF4_STATUS_OK)
#define REFUSED(call) CHECK((call) == NF4_STATUS_INVALID_ARGUMENT)

/* Entries of the codebook times 2: quantizing loses nothing. Twice as many, for the experts' tests.
 */
static float dense[EXPERTS * ALL];
static uint8_t packed[EXPERTS * ALL / 2];
static float absmax[EXPERTS * ROWS];

static nf4_tensor nf4_weight(int64_t rows) {
  nf4_tensor weight = {.struct_size = sizeof weight,
                       .format = NF4_FORMAT_NF4,
                       .blocksize = 64,
                       .rows = rows,
                       .cols = COLS,
                       .packed = packed,
                       .absmax = absmax};
  return weight;
}

static nf4_matmul_args product(const float *x, int64_t x_stride, float *y, int64_t y_stride) {
  nf4_matmul_args args = {.struct_size = sizeof args,
                          .dtype = NF4_DTYPE_FP32,
                          .m = 1,
                          .x = x,
                          .x_stride = x_stride,
                          .y = y,
                          .y_stride = y_stride};
  return args;
}

static void about_the_library(void) {
  CHECK(nf4_version() >= NF4_VERSION_MAJOR * 10000 + NF4_VERSION_MINOR * 100 + NF4_VERSION_PATCH);
  CHECK(nf4_version() / 10000 == NF4_VERSION_MAJOR);
  CHECK(strlen(nf4_version_string()) >= 5);
  CHECK(strstr(nf4_build_info(), "compiler: ") != NULL);
  CHECK(strlen(nf4_cpu_variant()) > 0);
  CHECK(strcmp(nf4_status_string(NF4_STATUS_CUDA_ERROR), "NF4_STATUS_CUDA_ERROR") == 0);
  CHECK(strcmp(nf4_last_error(), "") == 0);
  CHECK(nf4_codebook(NF4_FORMAT_NF4)[0] == -1.0f && nf4_codebook(NF4_FORMAT_NF4)[15] == 1.0f);
  CHECK(nf4_codebook(NF4_FORMAT_FP4)[3] == 1.0f && nf4_codebook(0) == NULL);
  CHECK(nf4_scale_code()[255] == 1.0f);
  nf4_device device = {.struct_size = sizeof device, .device_count = -1};
  const nf4_status status = nf4_device_info(0, &device);
  CHECK(status >= NF4_STATUS_OK && status <= NF4_STATUS_CUDA_ERROR && device.device_count >= 0);
  REFUSED(nf4_device_info(0, NULL));
}

static void quantize_and_dequantize(void) {
  const nf4_tensor weight = nf4_weight(EXPERTS * ROWS);
  for (int i = 0; i < EXPERTS * ALL; ++i)
    dense[i] = 2 * nf4_codebook(NF4_FORMAT_NF4)[(i + i / COLS) % 16];
  nf4_sizes sizes = {.struct_size = sizeof sizes};
  OK(nf4_tensor_sizes(&weight, &sizes));
  CHECK(sizes.packed_bytes == sizeof packed && sizes.absmax_bytes == sizeof absmax);
  size_t bytes = 1;
  OK(nf4_quantize_workspace_size(&weight, &bytes));
  CHECK(bytes == 0);
  OK(nf4_quantize_cpu(dense, NF4_DTYPE_FP32, &weight, NULL, 0, 1));
  CHECK(absmax[0] == 2 && packed[0] == 0x01 && packed[COLS / 2] == 0x12);
  float back[EXPERTS * ALL];
  OK(nf4_dequant_cpu(&weight, back, NF4_DTYPE_FP32, 1));
  CHECK(memcmp(back, dense, sizeof back) == 0);

  /* Nested scales that are all equal are their own mean, and come back exactly. */
  uint8_t scales[EXPERTS * ROWS];
  float nested_absmax[1], offset[1], workspace[64];
  nf4_tensor nested = weight;
  nested.absmax = scales;
  nested.nested_blocksize = 256;
  nested.nested_absmax = nested_absmax;
  nested.nested_code = nf4_scale_code();
  nested.nested_offset = offset;
  OK(nf4_quantize_workspace_size(&nested, &bytes));
  CHECK(bytes > 0 && bytes <= sizeof workspace);
  void *const aligned = (void *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15);
  OK(nf4_quantize_cpu(dense, NF4_DTYPE_FP32, &nested, aligned, bytes, 1));
  CHECK(offset[0] == 2);
  OK(nf4_dequant_cpu(&nested, back, NF4_DTYPE_FP32, 1));
  CHECK(memcmp(back, dense, sizeof back) == 0);
}

static void products(void) {
  const nf4_tensor weight = nf4_weight(ROWS);
  float x[COLS] = {[5] = 1}, y[2 * ROWS], dx[COLS];
  nf4_matmul_args args = product(x, COLS, y, ROWS);
  size_t bytes = 0;
  OK(nf4_matmul_workspace_size(&weight, &args, &bytes));
  OK(nf4_matmul_cpu(&weight, &args, 1));
  for (int row = 0; row < ROWS; ++row) CHECK(y[row] == dense[row * COLS + 5]);
  args.struct_size = 64; /* before it had lora */
  args.lora = (const nf4_lora *)1;
  OK(nf4_matmul_cpu(&weight, &args, 1));
  CHECK(y[1] == dense[COLS + 5]);

  nf4_matmul_args grad = product(y, ROWS, dx, COLS);
  memset(y, 0, sizeof y);
  y[2] = 1;
  OK(nf4_matmul_grad_workspace_size(&weight, &grad, &bytes));
  OK(nf4_matmul_grad_cpu(&weight, &grad, 1));
  CHECK(memcmp(dx, dense + 2 * COLS, sizeof dx) == 0);

  float a[COLS] = {[5] = 3}, b[ROWS] = {1, 0, 2, 0}, p[1];
  const nf4_lora lora = {.struct_size = sizeof lora,
                         .dtype = NF4_DTYPE_FP32,
                         .rank = 1,
                         .scale = 4,
                         .a = a,
                         .a_stride = COLS,
                         .b = b,
                         .b_stride = 1,
                         .product = p};
  args = product(x, COLS, y, ROWS);
  args.lora = &lora;
  OK(nf4_matmul_cpu(&weight, &args, 1));
  CHECK(p[0] == 3 && y[0] == dense[5] + 12 && y[1] == dense[COLS + 5]);

  /* scale q^T x and scale dy^T p, of one row each. */
  const float q[1] = {5}, dy[ROWS] = {0, 1, 0, 7};
  float da[COLS], db[ROWS];
  const nf4_lora_grad_args of_adapter = {.struct_size = sizeof of_adapter,
                                         .dtype = NF4_DTYPE_FP32,
                                         .grad_dtype = NF4_DTYPE_FP32,
                                         .rank = 1,
                                         .scale = 2,
                                         .m = 1,
                                         .rows = ROWS,
                                         .cols = COLS,
                                         .x = x,
                                         .x_stride = COLS,
                                         .dy = dy,
                                         .dy_stride = ROWS,
                                         .p = p,
                                         .q = q,
                                         .da = da,
                                         .da_stride = COLS,
                                         .db = db,
                                         .db_stride = 1};
  OK(nf4_lora_grad_cpu(&of_adapter, 1));
  CHECK(da[5] == 10 && da[6] == 0 && db[0] == 0 && db[3] == 42);

  const nf4_tensor *const weights[] = {&weight, &weight};
  const nf4_matmul_args both[] = {product(x, COLS, y, ROWS), product(x, COLS, y + ROWS, ROWS)};
  OK(nf4_matmul_batch_workspace_size(weights, both, 2, &bytes));
  OK(nf4_matmul_batch_cpu(weights, both, 2, 1));
  CHECK(y[3] == dense[3 * COLS + 5] && memcmp(y, y + ROWS, ROWS * sizeof *y) == 0);
  REFUSED(nf4_matmul_batch_cpu(weights, both, NF4_MATMUL_BATCH_MAX + 1, 1));
}

static void products_of_experts(void) {
  const nf4_tensor experts = nf4_weight(EXPERTS * ROWS);
  float x[COLS] = {[7] = 1}, y[EXPERTS * ROWS], dx[EXPERTS * COLS];
  const int32_t ends[] = {1, 2}, index[] = {0, 0};
  nf4_grouped_args args = {.struct_size = sizeof args,
                           .dtype = NF4_DTYPE_FP32,
                           .experts = EXPERTS,
                           .m = 2,
                           .x = x,
                           .x_stride = COLS,
                           .x_rows = 1,
                           .y = y,
                           .y_stride = ROWS,
                           .ends = ends,
                           .x_index = index};
  size_t bytes = 0;
  nf4_grouped_args sized = args;
  sized.dtype = NF4_DTYPE_BF16;
  OK(nf4_matmul_grouped_workspace_size(&experts, &sized, &bytes));
  OK(nf4_matmul_grouped_cpu(&experts, &args, 1));
  for (int row = 0; row < EXPERTS * ROWS; ++row) CHECK(y[row] == dense[row * COLS + 7]);

  memset(y, 0, sizeof y);
  y[1] = y[ROWS] = 1;
  args.x = y;
  args.x_stride = ROWS;
  args.x_rows = 2;
  args.x_index = NULL;
  args.y = dx;
  args.y_stride = COLS;
  sized = args;
  sized.dtype = NF4_DTYPE_BF16;
  OK(nf4_matmul_grouped_grad_workspace_size(&experts, &sized, &bytes));
  OK(nf4_matmul_grouped_grad_cpu(&experts, &args, 1));
  CHECK(memcmp(dx, dense + COLS, COLS * sizeof *dx) == 0);
  CHECK(memcmp(dx + COLS, dense + ROWS * COLS, COLS * sizeof *dx) == 0);
}

/* Scales of 1 in fp16 and no zeros: an element is its code less 8. */
static uint32_t words[EXPERTS * ALL / 8];
static uint16_t ones[EXPERTS * ROWS * GROUPS];

static nf4_int4_tensor int4_weight(nf4_int4_layout layout) {
  nf4_int4_tensor weight = {.struct_size = sizeof weight,
                            .layout = layout,
                            .scales_dtype = NF4_DTYPE_FP16,
                            .group_size = COLS / GROUPS,
                            .rows = layout == NF4_INT4_COMPRESSED_TENSORS ? ROWS : 8,
                            .cols = COLS,
                            .packed = words,
                            .scales = ones};
  for (size_t i = 0; i < sizeof words / sizeof *words; ++i) words[i] = 0x76543210u;
  for (size_t i = 0; i < sizeof ones / sizeof *ones; ++i) ones[i] = 0x3C00;
  return weight;
}

static void integers(void) {
  const nf4_int4_tensor weight = int4_weight(NF4_INT4_COMPRESSED_TENSORS);
  nf4_int4_sizes sizes = {.struct_size = sizeof sizes};
  OK(nf4_int4_tensor_sizes(&weight, &sizes));
  CHECK(sizes.groups == GROUPS && sizes.packed_bytes == ALL / 2 && sizes.zeros_bytes > 0);
  float back[ALL];
  OK(nf4_int4_dequant_cpu(&weight, back, NF4_DTYPE_FP32, 1));
  for (int i = 0; i < 8; ++i) CHECK(back[i] == (float)(i - 8));

  float in[ALL] = {[0] = 3};
  for (int i = 1; i < ALL; i += COLS / GROUPS) in[i] = -7.5f;
  ones[0] = 0;
  OK(nf4_int4_quantize_cpu(in, NF4_DTYPE_FP32, &weight, 1, 1));
  CHECK(ones[0] == 0x3C00 && words[0] == 0x8888880Bu);

  const nf4_int4_tensor plain = int4_weight(NF4_INT4_COMPRESSED_TENSORS);
  float x[COLS] = {[6] = 1}, y[2 * ROWS];
  const nf4_matmul_args args[] = {product(x, COLS, y, ROWS), product(x, COLS, y + ROWS, ROWS)};
  const nf4_int4_tensor *const weights[] = {&plain, &plain};
  size_t bytes = 0;
  OK(nf4_int4_matmul_workspace_size(&plain, args, &bytes));
  OK(nf4_int4_matmul_cpu(&plain, args, 1));
  CHECK(y[0] == -2 && y[3] == -2);
  OK(nf4_int4_matmul_batch_workspace_size(weights, args, 2, &bytes));
  OK(nf4_int4_matmul_batch_cpu(weights, args, 2, 1));
  CHECK(y[0] == -2 && y[2 * ROWS - 1] == -2);

  const int32_t ends[] = {1, 1};
  nf4_grouped_args grouped = {.struct_size = sizeof grouped,
                              .dtype = NF4_DTYPE_FP32,
                              .experts = EXPERTS,
                              .m = 1,
                              .x = x,
                              .x_stride = COLS,
                              .x_rows = 1,
                              .y = y,
                              .y_stride = ROWS,
                              .ends = ends};
  OK(nf4_int4_matmul_grouped_cpu(&plain, &grouped, 1));
  CHECK(y[0] == -2 && y[3] == -2);
  grouped.dtype = NF4_DTYPE_BF16;
  OK(nf4_int4_matmul_grouped_workspace_size(&plain, &grouped, &bytes));
}

static void act_order(void) {
  nf4_int4_tensor from = int4_weight(NF4_INT4_GPTQ), to = from;
  static uint32_t sorted[EXPERTS * ALL / 8];
  int32_t group[COLS], permutation[COLS];
  for (int i = 0; i < COLS; ++i) group[i] = i % GROUPS;
  from.g_idx = group;
  to.packed = sorted;
  to.permutation = permutation;
  OK(nf4_int4_reorder_cpu(&from, &to, 1));
  CHECK(permutation[1] == 2 && permutation[COLS / 2] == 1);
  CHECK(sorted[0] == 0x64206420u);
}

/* Refused before any GPU is looked for. */
static void launches(void) {
  const nf4_tensor weight = nf4_weight(ROWS);
  const nf4_int4_tensor integer = int4_weight(NF4_INT4_AWQ);
  REFUSED(nf4_dequant_launch(&weight, NULL, NF4_DTYPE_BF16, NULL));
  REFUSED(nf4_quantize_launch(NULL, NF4_DTYPE_BF16, &weight, NULL, 0, NULL));
  REFUSED(nf4_matmul_launch(&weight, NULL, NULL, 0, NULL));
  REFUSED(nf4_matmul_grad_launch(&weight, NULL, NULL, 0, NULL));
  REFUSED(nf4_lora_grad_launch(NULL, NULL));
  REFUSED(nf4_matmul_batch_launch(NULL, NULL, 1, NULL, 0, NULL));
  REFUSED(nf4_matmul_plan(NULL, NULL, 1, 0, NULL, NULL));
  REFUSED(nf4_matmul_grouped_launch(&weight, NULL, NULL, 0, NULL));
  REFUSED(nf4_matmul_grouped_grad_launch(&weight, NULL, NULL, 0, NULL));
  REFUSED(nf4_int4_dequant_launch(&integer, NULL, NF4_DTYPE_BF16, NULL));
  REFUSED(nf4_int4_quantize_launch(NULL, NF4_DTYPE_BF16, &integer, 1, NULL));
  REFUSED(nf4_int4_reorder_launch(&integer, &integer, NULL));
  REFUSED(nf4_int4_matmul_launch(&integer, NULL, NULL, 0, NULL));
  REFUSED(nf4_int4_matmul_batch_launch(NULL, NULL, 1, NULL, 0, NULL));
  REFUSED(nf4_int4_matmul_plan(NULL, NULL, 1, 0, NULL, NULL));
  REFUSED(nf4_int4_matmul_grouped_launch(&integer, NULL, NULL, 0, NULL));
}

int main(void) {
  about_the_library();
  quantize_and_dequantize();
  products();
  products_of_experts();
  integers();
  act_order();
  launches();
  printf("%d checks, %d failed\n", checks, failures);
  return failures > 0;
}
