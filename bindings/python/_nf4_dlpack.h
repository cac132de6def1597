/* Tensors as C sees them, by DLPack's exchange (torch has it from 2.10 on). */
#ifndef NF4_DLPACK_H
#define NF4_DLPACK_H

#include <Python.h>
#include <stdbool.h>

#include "nf4/nf4.h"

/* ---- DLPack 1 (dlpack.h): what is read of it ------------------------------- */

enum { DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_MAJOR = 1 };

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
  int (*view)(void *object, dl_tensor *out); /* borrowed; 0, or -1 and an exception */
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

/* 0 if it is no dtype of dense data. */
static inline nf4_dtype dtype_of(const dl_tensor *view) {
  if (view->lanes != 1) return 0;
  if (view->code == DL_FLOAT && view->bits == 32) return NF4_DTYPE_FP32;
  if (view->code == DL_FLOAT && view->bits == 16) return NF4_DTYPE_FP16;
  if (view->code == DL_BFLOAT && view->bits == 16) return NF4_DTYPE_BF16;
  return 0;
}

/* The exchange of a type of tensors, of the version that is known here; or NULL, with an
 * exception. */
static inline const dl_exchange *exchange_of(PyObject *type) {
  PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (capsule == NULL) return NULL;
  const dl_exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);
  if (PyErr_Occurred()) return NULL;
  while (found != NULL && found->major != DL_MAJOR) found = found->previous;
  if (found != NULL && found->view != NULL) return found;
  PyErr_SetString(PyExc_BufferError, "no DLPack exchange of version 1 that lends tensors");
  return NULL;
}

#endif
