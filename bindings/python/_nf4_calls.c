/* _nf4_fast.Calls: a product or a dequantize of a weight whose parts come with each call, as
 * operators get them. Nothing is kept from one call to the next. What is not common and faultless
 * gets None for an answer, as in _nf4_fast.c.
 */
#include "_nf4_dlpack.h"
#include "_nf4_fast.h"

typedef nf4_status (*dequant_launch)(const nf4_tensor *, void *, nf4_dtype, nf4_stream);
typedef nf4_status (*dequant_cpu)(const nf4_tensor *, void *, nf4_dtype, int32_t);
typedef nf4_status (*matmul_launch)(const nf4_tensor *, const nf4_matmul_args *, void *, size_t,
                                    nf4_stream);
typedef nf4_status (*matmul_cpu)(const nf4_tensor *, const nf4_matmul_args *, int32_t);
typedef nf4_status (*workspace_size)(const nf4_tensor *, const nf4_matmul_args *, size_t *);

typedef struct calls {
  PyObject_HEAD const dl_exchange *exchange;
  dequant_launch dequant_launch;
  dequant_cpu dequant_cpu;
  matmul_launch matmul_launch;
  matmul_cpu matmul_cpu;
  workspace_size matmul_workspace_size;
} calls;

/* Where the tensors of a call are: all of them where the first is. */
typedef struct place {
  const dl_exchange *exchange;
  int32_t device_type, device_id;
} place;

static bool borrow(const place *where, PyObject *object, dl_tensor *view) {
  return where->exchange->view(object, view) == 0 && view->device_type == where->device_type &&
         view->device_id == where->device_id && has_memory(view);
}

/* The place of a call is that of this tensor. */
static bool begin(const calls *self, PyObject *object, dl_tensor *view, place *where) {
  where->exchange = self->exchange;
  if (self->exchange->view(object, view) != 0) return false;
  where->device_type = view->device_type;
  where->device_id = view->device_id;
  return (view->device_type == DL_CPU || view->device_type == DL_CUDA) && has_memory(view);
}

/* A part of a weight: so many contiguous elements, of uint8 or float32. */
static bool part(const place *where, PyObject *object, int64_t elements, bool bytes,
                 const void **address) {
  dl_tensor view;
  if (!borrow(where, object, &view)) return false;
  *address = address_of(&view);
  return is_part(&view, elements, bytes);
}

/* Arguments of every call, from the first of these on. */
enum {
  THREADS, /* on the CPU: how many at most */
  PACKED,
  ABSMAX,
  NESTED_ABSMAX,
  NESTED_CODE,
  NESTED_OFFSET,
  CODEBOOK,
  FORMAT,
  BLOCKSIZE,
  NESTED_BLOCKSIZE,
  ROWS,
  COLS,
  WEIGHT_ARGUMENTS
};

static bool threads_of(PyObject *const *arguments, int32_t *threads) {
  const long given = PyLong_AsLong(arguments[THREADS]);
  *threads = (int32_t)given;
  return !PyErr_Occurred() && given >= 0 && given <= INT32_MAX;
}

static bool integers(PyObject *const *arguments, nf4_tensor *weight) {
  weight->struct_size = sizeof *weight;
  const long long format = PyLong_AsLongLong(arguments[FORMAT]);
  const long long blocksize = PyLong_AsLongLong(arguments[BLOCKSIZE]);
  const long long nested = PyLong_AsLongLong(arguments[NESTED_BLOCKSIZE]);
  weight->rows = PyLong_AsLongLong(arguments[ROWS]);
  weight->cols = PyLong_AsLongLong(arguments[COLS]);
  if (PyErr_Occurred() || weight->rows < 0 || weight->cols < 0) return false;
  if (weight->rows > 0 && weight->cols > INT64_MAX / weight->rows) return false;
  if (blocksize <= 0 || blocksize > INT32_MAX || nested < 0 || nested > INT32_MAX) return false;
  if (format != NF4_FORMAT_NF4 && format != NF4_FORMAT_FP4) return false;
  weight->format = (nf4_format)format;
  weight->blocksize = (int32_t)blocksize;
  weight->nested_blocksize = (int32_t)nested;
  return true;
}

static bool nested_parts(const place *where, PyObject *const *arguments, int64_t blocks,
                         nf4_tensor *weight) {
  const void *absmax, *code, *offset;
  const int64_t nested = divide_up(blocks, weight->nested_blocksize);
  if (!part(where, arguments[NESTED_ABSMAX], nested, false, &absmax)) return false;
  if (!part(where, arguments[NESTED_CODE], 256, false, &code)) return false;
  if (!part(where, arguments[NESTED_OFFSET], 1, false, &offset)) return false;
  weight->nested_absmax = (void *)absmax;
  weight->nested_code = code;
  weight->nested_offset = (void *)offset;
  return true;
}

static bool weight_of(const place *where, PyObject *const *arguments, nf4_tensor *weight) {
  if (!integers(arguments, weight)) return false;
  const int64_t elements = weight->rows * weight->cols;
  const int64_t blocks = divide_up(elements, weight->blocksize);
  const bool nested = weight->nested_blocksize != 0;
  const void *packed, *absmax, *codebook = NULL;
  if (!part(where, arguments[PACKED], divide_up(elements, 2), true, &packed)) return false;
  if (!part(where, arguments[ABSMAX], blocks, nested, &absmax)) return false;
  if (arguments[CODEBOOK] != Py_None && !part(where, arguments[CODEBOOK], 16, false, &codebook))
    return false;
  weight->packed = (void *)packed;
  weight->absmax = (void *)absmax;
  weight->codebook = codebook;
  return !nested || nested_parts(where, arguments, blocks, weight);
}

static bool stream_of(const place *where, nf4_stream *stream) {
  void *found = NULL;
  if (where->exchange->current_stream(where->device_type, where->device_id, &found) != 0)
    return false;
  *stream = (nf4_stream)found;
  return true;
}

static PyObject *none(void) {
  PyErr_Clear();
  Py_RETURN_NONE;
}

static bool count_is(Py_ssize_t count, Py_ssize_t expected) {
  if (count == expected) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments; expected %zd", count, expected);
  return false;
}

static bool output(const place *where, PyObject *object, int64_t elements, void **address,
                   nf4_dtype *dtype) {
  dl_tensor view;
  if (!borrow(where, object, &view) || elements_of(&view) != elements) return false;
  *address = (void *)address_of(&view);
  *dtype = dtype_of(&view);
  return *dtype != 0 && is_contiguous(&view, elements);
}

/* Arguments of a product, before those of every call. */
enum { X, Y, BIAS, SCRATCH, PRODUCT_ARGUMENTS };

static bool operands(const calls *self, PyObject *const *arguments, place *where,
                     nf4_tensor *weight, nf4_matmul_args *args) {
  dl_tensor x;
  if (!begin(self, arguments[X], &x, where)) return false;
  if (!weight_of(where, arguments + PRODUCT_ARGUMENTS, weight)) return false;
  args->struct_size = sizeof *args;
  args->dtype = dtype_of(&x);
  args->x = address_of(&x);
  if (!rows_of(&x, weight->cols, &args->m, &args->x_stride)) return false;
  args->y_stride = weight->rows;
  if (weight->rows > 0 && args->m > INT64_MAX / weight->rows) return false;
  nf4_dtype dtype;
  void *bias;
  if (!output(where, arguments[Y], args->m * weight->rows, &args->y, &dtype)) return false;
  if (dtype != args->dtype) return false;
  if (arguments[BIAS] == Py_None) return true;
  if (!output(where, arguments[BIAS], weight->rows, &bias, &dtype)) return false;
  args->bias = bias;
  return dtype == args->dtype;
}

/* Enqueues the product on torch's current stream; NULL with an error if there is no memory for
 * the scratch, which is the stream's as soon as torch has it back. */
static PyObject *launch_matmul(const calls *self, PyObject *const *arguments, const place *where,
                               const nf4_tensor *weight, const nf4_matmul_args *args) {
  nf4_stream stream;
  size_t needed = 0;
  nf4_status status;
  PyObject *scratch = NULL;
  const void *workspace = NULL;
  if (args->dtype == NF4_DTYPE_FP32 || !stream_of(where, &stream)) return none();
  if (self->matmul_workspace_size(weight, args, &needed) != NF4_STATUS_OK) return none();
  if (needed != 0) {
    scratch = PyObject_CallFunction(arguments[SCRATCH], "On", arguments[X], (Py_ssize_t)needed);
    if (scratch == NULL) return NULL;
    if (!part(where, scratch, (int64_t)needed, true, &workspace)) {
      Py_DECREF(scratch);
      return none();
    }
  }
  Py_BEGIN_ALLOW_THREADS status =
      self->matmul_launch(weight, args, (void *)workspace, needed, stream);
  Py_END_ALLOW_THREADS Py_XDECREF(scratch);
  return PyLong_FromLong(status);
}

PyDoc_STRVAR(matmul_doc,
             "matmul(x, y, bias, scratch, threads, packed, absmax, nested_absmax, nested_code, "
             "nested_offset, codebook, format, blocksize, nested_blocksize, rows, cols)\n--\n\n"
             "y = x W^T + bias on torch's current stream, and the nf4_status; None if nothing was "
             "done, and the arguments have to be looked at more closely. Where scratch is needed, "
             "scratch(x, nbytes) is a tensor of so many bytes beside x.");
static PyObject *matmul(calls *self, PyObject *const *arguments, Py_ssize_t count) {
  if (!count_is(count, PRODUCT_ARGUMENTS + WEIGHT_ARGUMENTS)) return NULL;
  place where;
  nf4_tensor weight = {0};
  nf4_matmul_args args = {0};
  if (!operands(self, arguments, &where, &weight, &args)) return none();
  if (where.device_type == DL_CUDA) return launch_matmul(self, arguments, &where, &weight, &args);
  nf4_status status;
  int32_t threads;
  if (!threads_of(arguments + PRODUCT_ARGUMENTS, &threads)) return none();
  Py_BEGIN_ALLOW_THREADS status = self->matmul_cpu(&weight, &args, threads);
  Py_END_ALLOW_THREADS return PyLong_FromLong(status);
}

PyDoc_STRVAR(
    dequantize_doc,
    "dequantize(out, threads, packed, absmax, nested_absmax, nested_code, nested_offset, codebook, "
    "format, blocksize, nested_blocksize, rows, cols)\n--\n\n"
    "Writes the numbers to `out` on torch's current stream, and gives what matmul gives.");
static PyObject *dequantize(calls *self, PyObject *const *arguments, Py_ssize_t count) {
  if (!count_is(count, 1 + WEIGHT_ARGUMENTS)) return NULL;
  place where;
  dl_tensor view;
  nf4_tensor weight = {0};
  void *out;
  nf4_dtype dtype;
  if (!begin(self, arguments[0], &view, &where)) return none();
  if (!weight_of(&where, arguments + 1, &weight)) return none();
  if (!output(&where, arguments[0], weight.rows * weight.cols, &out, &dtype)) return none();
  nf4_status status;
  if (where.device_type == DL_CPU) {
    int32_t threads;
    if (!threads_of(arguments + 1, &threads)) return none();
    Py_BEGIN_ALLOW_THREADS status = self->dequant_cpu(&weight, out, dtype, threads);
    Py_END_ALLOW_THREADS return PyLong_FromLong(status);
  }
  nf4_stream stream;
  if (!stream_of(&where, &stream)) return none();
  Py_BEGIN_ALLOW_THREADS status = self->dequant_launch(&weight, out, dtype, stream);
  Py_END_ALLOW_THREADS return PyLong_FromLong(status);
}

/* ---- The type ---------------------------------------------------------------- */

static void deallocate(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyDoc_STRVAR(calls_doc,
             "Calls(type, dequant_launch, dequant_cpu, matmul_launch, matmul_cpu, "
             "matmul_workspace_size)\n--\n\n"
             "The functions of libnf4, by their addresses, for tensors that `type`, which is "
             "torch.Tensor, lends by DLPack.");
static PyObject *calls_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  (void)keywords;
  PyObject *tensor;
  unsigned long long address[5];
  if (!PyArg_ParseTuple(arguments, "OKKKKK", &tensor, &address[0], &address[1], &address[2],
                        &address[3], &address[4]))
    return NULL;
  const dl_exchange *exchange = exchange_of(tensor);
  calls *self = exchange ? (calls *)PyType_GenericAlloc(type, 0) : NULL;
  if (self == NULL) return NULL;
  self->exchange = exchange;
  self->dequant_launch = (dequant_launch)(uintptr_t)address[0];
  self->dequant_cpu = (dequant_cpu)(uintptr_t)address[1];
  self->matmul_launch = (matmul_launch)(uintptr_t)address[2];
  self->matmul_cpu = (matmul_cpu)(uintptr_t)address[3];
  self->matmul_workspace_size = (workspace_size)(uintptr_t)address[4];
  return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"matmul", (PyCFunction)(void (*)(void))matmul, METH_FASTCALL, matmul_doc},
    {"dequantize", (PyCFunction)(void (*)(void))dequantize, METH_FASTCALL, dequantize_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)calls_doc},
    {Py_tp_new, (void *)calls_new},
    {Py_tp_dealloc, (void *)deallocate},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec nf4_calls_spec = {
    .name = "_nf4_fast.Calls",
    .basicsize = sizeof(calls),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
