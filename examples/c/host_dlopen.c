/* Loads libnf4 at run time, quantizes a weight on the CPU, dequantizes it and prints the error. To
 * compile it needs nf4.h, and it does not link libnf4.
 *
 *   cc host_dlopen.c -ldl -lm -o host_dlopen
 *   ./host_dlopen [path of libnf4.so.0] */
#include <dlfcn.h>
#include <math.h>
#include <nf4/nf4.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 256, COLS = 1000, BLOCKSIZE = 64, NESTED_BLOCKSIZE = 256 };

static void *library;

static void *symbol(const char *name) {
  void *address = dlsym(library, name);
  if (address == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return address;
}

/* Fills `pointer`, a function pointer of the right type, with the function of that name. */
#define LOAD(pointer, name) (*(void **)&(pointer) = symbol(name))

static nf4_status (*tensor_sizes)(const nf4_tensor *, nf4_sizes *);
static nf4_status (*workspace_size)(const nf4_tensor *, size_t *);
static nf4_status (*quantize)(const void *, nf4_dtype, const nf4_tensor *, void *, size_t, int32_t);
static nf4_status (*dequant)(const nf4_tensor *, void *, nf4_dtype, int32_t);
static const float *(*scale_code)(void);
static const char *(*version_string)(void);
static const char *(*last_error)(void);

static void load(const char *path) {
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  LOAD(tensor_sizes, "nf4_tensor_sizes");
  LOAD(workspace_size, "nf4_quantize_workspace_size");
  LOAD(quantize, "nf4_quantize_cpu");
  LOAD(dequant, "nf4_dequant_cpu");
  LOAD(scale_code, "nf4_scale_code");
  LOAD(version_string, "nf4_version_string");
  LOAD(last_error, "nf4_last_error");
}

static void check(nf4_status status) {
  if (status != NF4_STATUS_OK) {
    fprintf(stderr, "libnf4: %s\n", last_error());
    exit(1);
  }
}

static void *allocate(int64_t bytes) {
  void *memory = malloc((size_t)bytes);
  if (memory == NULL) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return memory;
}

int main(int argc, char **argv) {
  load(argc > 1 ? argv[1] : "libnf4.so.0");
  printf("libnf4 %s\n", version_string());

  nf4_tensor weight = {0};
  weight.struct_size = sizeof weight;
  weight.format = NF4_FORMAT_NF4;
  weight.blocksize = BLOCKSIZE;
  weight.nested_blocksize = NESTED_BLOCKSIZE;
  weight.rows = ROWS;
  weight.cols = COLS;

  /* The sizes need the shape alone; the pointers come next. */
  nf4_sizes sizes = {0};
  sizes.struct_size = sizeof sizes;
  check(tensor_sizes(&weight, &sizes));
  weight.packed = allocate(sizes.packed_bytes);
  weight.absmax = allocate(sizes.absmax_bytes);
  weight.nested_absmax = allocate(sizes.nested_blocks * (int64_t)sizeof(float));
  weight.nested_offset = allocate(sizeof(float));
  weight.nested_code = scale_code();

  float *dense = allocate(sizes.elements * (int64_t)sizeof(float));
  float *back = allocate(sizes.elements * (int64_t)sizeof(float));
  for (int64_t i = 0; i < sizes.elements; ++i)
    dense[i] = (float)(rand() - RAND_MAX / 2) / (float)RAND_MAX;

  size_t workspace_bytes = 0;
  check(workspace_size(&weight, &workspace_bytes));
  void *workspace = allocate((int64_t)workspace_bytes);
  check(quantize(dense, NF4_DTYPE_FP32, &weight, workspace, workspace_bytes, 0));
  check(dequant(&weight, back, NF4_DTYPE_FP32, 0));

  double squares = 0, largest = 0;
  for (int64_t i = 0; i < sizes.elements; ++i) {
    const double error = fabs((double)back[i] - dense[i]);
    squares += error * error;
    largest = fmax(largest, error);
  }
  const int64_t bytes = sizes.packed_bytes + sizes.absmax_bytes + sizes.nested_blocks * 4 + 4;
  printf("%d x %d numbers in %lld bytes, %.3f bits each\n", ROWS, COLS, (long long)bytes,
         8.0 * (double)bytes / (double)sizes.elements);
  printf("error: RMS %.4f, largest %.4f, of numbers in [-0.5, 0.5]\n",
         sqrt(squares / (double)sizes.elements), largest);

  free(workspace);
  free(back);
  free(dense);
  free(weight.nested_offset);
  free(weight.nested_absmax);
  free(weight.absmax);
  free(weight.packed);
  dlclose(library);

  /* The widest gap between codes is 0.3 of a block's largest number, here at most 0.5; the
   * quantized scale adds a little. */
  return largest > 0 && largest < 0.1 ? 0 : 1;
}
