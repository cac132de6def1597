/* Tensors in C, through DLPack's exchange (torch has it from 2.10 on). */
#ifndef NF4_DLPACK_H
#define NF4_DLPACK_H

#include <Python.h>
#include <stdbool.h>

#include "nf4/nf4.h"

/* ---- DLPack 1 (dlpack.h): what is read of it ------------------------------- */

enum {
  DL_CPU = 1,
  DL_CUDA = 2,
  DL_INT = 0,
  DL_UINT = 1,
  DL_FLOAT = 2,
  DL_BFLOAT = 4,
  DL_MAJOR = 1
};

typedef struct dl_tensor {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides; /* strides in elements; NULL is row-major */
  uint64_t byte_offset;
} dl_tensor;

typedef struct dl_exchange {
  uint32_t major, minor;
  struct dl_exchange *previous;
  void *allocate, *export_owned, *import_owned;
  int (*view)(void *object, dl_tensor *out); /* borrowed; returns 0, or -1 with an exception */
  int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} dl_exchange;

static inline const char *address_of(const dl_tensor *view) {
  return (const char *)view->data + view->byte_offset;
}

static inline bool is_contiguous(const dl_tensor *view, int64_t elements) {
  if (view->strides == NULL || elements == 0) return true;
  int64_t expected = 1;
  for (int32_t i = view->ndim; i-- > 0;) {
    if (view->shape[i] != 1 && view->strides[i] != expected) return false;
    expected *= view->shape[i];
  }
  return true;
}

static inline int64_t elements_of(const dl_tensor *view) {
  int64_t elements = 1;
  for (int32_t i = 0; i < view->ndim; i++) elements *= view->shape[i];
  return elements;
}

/* A tensor whose storage was freed keeps its shape, but its address is NULL, which libnf4 would
 * read as no bias, or as the format's own codebook. */
static inline bool has_memory(const dl_tensor *view) {
  return view->data != NULL || elements_of(view) == 0;
}

/* Returns 0 if it is not a dtype of dense data. */
static inline nf4_dtype dtype_of(const dl_tensor *view) {
  if (view->lanes != 1) return 0;
  if (view->code == DL_FLOAT && view->bits == 32) return NF4_DTYPE_FP32;
  if (view->code == DL_FLOAT && view->bits == 16) return NF4_DTYPE_FP16;
  if (view->code == DL_BFLOAT && view->bits == 16) return NF4_DTYPE_BF16;
  return 0;
}

/* Tells whether it is a part of a weight: `elements` contiguous elements of uint8 or float32. */
static inline bool is_part(const dl_tensor *view, int64_t elements, bool bytes) {
  const uint8_t code = bytes ? DL_UINT : DL_FLOAT, bits = bytes ? 8 : 32;
  return view->lanes == 1 && view->code == code && view->bits == bits &&
         elements_of(view) == elements && is_contiguous(view, elements);
}

/* Finds the number of rows of `cols` elements, and their distance, if they are equally spaced. */
static inline bool rows_of(const dl_tensor *view, int64_t cols, int64_t *rows, int64_t *stride) {
  const int32_t last = view->ndim - 1;
  if (last < 0 || view->shape[last] != cols) return false;
  *rows = 1;
  for (int32_t i = 0; i < last; i++) *rows *= view->shape[i];
  *stride = cols;
  if (view->strides == NULL || *rows == 0 || cols == 0) return true;
  if (cols != 1 && view->strides[last] != 1) return false;
  int64_t expected = 0;
  for (int32_t i = last; i-- > 0;) {
    if (view->shape[i] == 1) continue;
    if (expected == 0) {
      *stride = expected = view->strides[i];
      if (*stride < cols) return false; /* one row that is seen several times, for instance */
    } else if (view->strides[i] != expected) {
      return false;
    }
    expected *= view->shape[i];
  }
  return true;
}

static inline int64_t divide_up(int64_t count, int64_t by) {
  return count / by + (count % by != 0);
}

/* Returns the exchange of a type of tensors, if its version is known here; otherwise NULL with
 * an exception. */
static inline const dl_exchange *exchange_of(PyObject *type) {
  PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (capsule == NULL) return NULL;
  const dl_exchange *found =
      (const dl_exchange *)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);
  if (PyErr_Occurred()) return NULL;
  while (found != NULL && found->major != DL_MAJOR) found = found->previous;
  if (found != NULL && found->view != NULL) return found;
  PyErr_SetString(PyExc_BufferError, "no DLPack exchange of version 1 that lends tensors");
  return NULL;
}

#endif
