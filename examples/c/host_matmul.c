/* Multiplies x by weights that stay in 4 bits, on the CPU: y = x W^T for one weight, then for two
 * weights that share x, in one call. Compares with products of the dequantized weights.
 *
 *   eval "cc host_matmul.c $(pkg-config --cflags --libs nf4) -lm" */
#include <math.h>
#include <nf4/nf4.h>
#include <stdio.h>
#include <stdlib.h>

enum { GATE_ROWS = 300, UP_ROWS = 200, COLS = 1000, M = 5 };

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

static float *random_numbers(int64_t count) {
  float *numbers = allocate(count * (int64_t)sizeof(float));
  for (int64_t i = 0; i < count; ++i) numbers[i] = (float)(rand() - RAND_MAX / 2) / (float)RAND_MAX;
  return numbers;
}

/* A weight in blocks of 64 with plain scales; nested_blocksize 0 needs no workspace. */
static nf4_tensor random_weight(int64_t rows) {
  nf4_tensor weight = {.struct_size = sizeof weight,
                       .format = NF4_FORMAT_NF4,
                       .blocksize = 64,
                       .rows = rows,
                       .cols = COLS};
  nf4_sizes sizes = {.struct_size = sizeof sizes};
  check(nf4_tensor_sizes(&weight, &sizes));
  weight.packed = allocate(sizes.packed_bytes);
  weight.absmax = allocate(sizes.absmax_bytes);
  float *numbers = random_numbers(rows * COLS);
  check(nf4_quantize_cpu(numbers, NF4_DTYPE_FP32, &weight, NULL, 0, 0));
  free(numbers);
  return weight;
}

/* M rows of x times a weight; y may be wider than the weight has rows. */
static nf4_matmul_args product(const nf4_tensor *weight, const float *x, float *y,
                               int64_t y_stride) {
  return (nf4_matmul_args){.struct_size = sizeof(nf4_matmul_args),
                           .dtype = NF4_DTYPE_FP32,
                           .m = M,
                           .x = x,
                           .x_stride = weight->cols,
                           .y = y,
                           .y_stride = y_stride};
}

/* ||y - x W^T|| / ||x W^T|| */
static double error_of(const nf4_tensor *weight, const float *x, const float *y, int64_t y_stride) {
  float *dense = allocate(weight->rows * COLS * (int64_t)sizeof(float));
  double off = 0, size = 0;
  check(nf4_dequant_cpu(weight, dense, NF4_DTYPE_FP32, 0));
  for (int64_t i = 0; i < M; ++i)
    for (int64_t row = 0; row < weight->rows; ++row) {
      double sum = 0;
      for (int64_t k = 0; k < COLS; ++k) sum += (double)x[i * COLS + k] * dense[row * COLS + k];
      const double difference = y[i * y_stride + row] - sum;
      off += difference * difference;
      size += sum * sum;
    }
  free(dense);
  return sqrt(off / size);
}

int main(void) {
  const nf4_tensor gate = random_weight(GATE_ROWS), up = random_weight(UP_ROWS);
  float *x = random_numbers(M * COLS);
  const int64_t width = GATE_ROWS + UP_ROWS;
  float *y = allocate(M * width * (int64_t)sizeof(float));

  const nf4_matmul_args alone = product(&gate, x, y, GATE_ROWS);
  check(nf4_matmul_cpu(&gate, &alone, 0));
  const double first = error_of(&gate, x, y, GATE_ROWS);

  /* Both into one matrix, side by side. */
  const nf4_tensor *const weights[] = {&gate, &up};
  const nf4_matmul_args both[] = {product(&gate, x, y, width),
                                  product(&up, x, y + GATE_ROWS, width)};
  check(nf4_matmul_batch_cpu(weights, both, 2, 0));
  const double second = error_of(&gate, x, y, width),
               third = error_of(&up, x, y + GATE_ROWS, width);

  printf("libnf4 %s, %s: relative errors %.1e alone, %.1e and %.1e in one call\n",
         nf4_version_string(), nf4_cpu_variant(), first, second, third);
  free(y);
  free(x);
  free(up.absmax);
  free(up.packed);
  free(gate.absmax);
  free(gate.packed);
  /* Sums in fp32; false for NaN, too. */
  return first < 1e-6 && second < 1e-6 && third < 1e-6 ? 0 : 1;
}
