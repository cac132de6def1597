/* _nf4_fast: calls libnf4 without ctypes. This file has Weight, which dequantizes a
 * QuantizedTensor or an Int4Tensor; the operators of nf4.torch are in _nf4_ops.cpp. It handles
 * common calls without faults: tensors of a library that has DLPack's C exchange (torch from
 * 2.10 on), and raw addresses. Everything else, faults included, gets None; package nf4 then
 * does the same in Python and words the errors. The package is complete without this module,
 * which is not built if Python's headers are missing. */
#include "_nf4_fast.h"

#include "_nf4_dlpack.h"

/* ---- A weight --------------------------------------------------------------- */

enum { MAX_PARTS = 6 };

/* An nf4_tensor or an nf4_int4_tensor; the function that takes it knows which. */
typedef struct any_weight any_weight;
typedef nf4_status (*launch_function)(const any_weight *, void *, nf4_dtype, nf4_stream);
typedef nf4_status (*cpu_function)(const any_weight *, void *, nf4_dtype, int32_t);

/* Nothing in it changes after its creation, so threads may share it. */
typedef struct weight {
  PyObject_HEAD PyObject *descriptor; /* owns the memory of `tensor` */
  PyObject *parts;                    /* a tuple of the tensors among the parts */
  PyObject *dtypes;                   /* maps the names of an nf4_dtype to int */
  PyObject *type;          /* the type of tensors that may be outputs; None if there are none */
  PyObject *requires_grad; /* the attribute's name, and the method is_neg of `type` */
  PyObject *is_neg;
  const any_weight *tensor;
  const dl_exchange *exchange; /* NULL if there are no tensors */
  uintptr_t function;
  const void *addresses[MAX_PARTS];
  int64_t elements;
  nf4_dtype dtype; /* the dtype of an output that is an address, unless the caller names one */
  int32_t device_type, device_id;
  int on_device;
} weight;

/* Package nf4 words the error, if there is one. */
static PyObject *leave_to_python(void) {
  PyErr_Clear();
  Py_RETURN_NONE;
}

/* Checks properties that a dl_tensor does not have: autograd may forbid writing to the tensor,
 * or it may have the negative bit. */
static bool is_plain(const weight *self, PyObject *tensor) {
  PyObject *requires_grad = PyObject_GetAttr(tensor, self->requires_grad);
  PyObject *negative =
      requires_grad ? PyObject_CallFunctionObjArgs(self->is_neg, tensor, NULL) : NULL;
  const bool plain = requires_grad == Py_False && negative == Py_False;
  Py_XDECREF(requires_grad);
  Py_XDECREF(negative);
  return plain;
}

static bool view_output(const weight *self, PyObject *out, void **address, nf4_dtype *dtype) {
  if (PyLong_CheckExact(out)) {
    /* PyLong_AsVoidPtr would accept a negative number. */
    *address = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(out);
    *dtype = self->dtype;
    return !PyErr_Occurred();
  }
  dl_tensor view;
  if ((PyObject *)Py_TYPE(out) != self->type || self->exchange->view(out, &view) != 0) return false;
  *address = (void *)address_of(&view);
  *dtype = dtype_of(&view);
  return *dtype != 0 && view.device_type == self->device_type &&
         view.device_id == self->device_id && elements_of(&view) == self->elements &&
         is_contiguous(&view, self->elements) && is_plain(self, out);
}

/* Checks that `wanted`, None or a name of a dtype, agrees with `*dtype`. An address has no dtype
 * of its own and takes that of `wanted`. */
static bool agree_on_dtype(const weight *self, PyObject *wanted, bool raw, nf4_dtype *dtype) {
  if (wanted == Py_None) return true;
  PyObject *code = PyDict_GetItemWithError(self->dtypes, wanted);
  if (code == NULL) return false;
  const nf4_dtype named = (nf4_dtype)PyLong_AsLong(code);
  if (raw) *dtype = named;
  return named == *dtype;
}

static bool stream_of(const weight *self, PyObject *given, void **stream) {
  *stream = NULL;
  if (given == Py_None)
    return self->exchange == NULL ||
           self->exchange->current_stream(self->device_type, self->device_id, stream) == 0;
  PyObject *handle =
      PyLong_CheckExact(given) ? Py_NewRef(given) : PyObject_GetAttrString(given, "cuda_stream");
  if (handle == NULL) return false;
  const unsigned long long value = PyLong_AsUnsignedLongLong(handle);
  Py_DECREF(handle);
  *stream = (void *)(uintptr_t)value;
  return !PyErr_Occurred();
}

PyDoc_STRVAR(in_place_doc, "in_place()\n--\n\nIs each tensor's memory where it was?");
static PyObject *in_place(weight *self, PyObject *Py_UNUSED(none)) {
  const Py_ssize_t parts = PyTuple_Size(self->parts);
  for (Py_ssize_t i = 0; i < parts; i++) {
    dl_tensor view;
    if (self->exchange->view(PyTuple_GetItem(self->parts, i), &view) != 0) {
      PyErr_Clear();
      Py_RETURN_FALSE;
    }
    if (address_of(&view) != self->addresses[i]) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

PyDoc_STRVAR(
    launch_doc,
    "launch(out, dtype, stream)\n--\n\n"
    "Dequantizes and returns the nf4_status; None if nothing was done and the call is left "
    "to Python.");
static PyObject *launch(weight *self, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "%zd arguments; expected 3", count);
  PyObject *out = arguments[0], *wanted = arguments[1], *given = arguments[2];
  void *address, *stream;
  nf4_dtype dtype;
  if (!view_output(self, out, &address, &dtype)) return leave_to_python();
  if (!agree_on_dtype(self, wanted, PyLong_CheckExact(out), &dtype)) return leave_to_python();
  if (self->on_device ? !stream_of(self, given, &stream) : given != Py_None)
    return leave_to_python();
  nf4_status status;
  Py_BEGIN_ALLOW_THREADS if (self->on_device) status =
      ((launch_function)self->function)(self->tensor, address, dtype, (nf4_stream)stream);
  else status = ((cpu_function)self->function)(self->tensor, address, dtype, 0);
  Py_END_ALLOW_THREADS return PyLong_FromLong(status);
}

/* ---- The type ---------------------------------------------------------------- */

static int traverse(weight *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->descriptor);
  Py_VISIT(self->parts);
  Py_VISIT(self->dtypes);
  Py_VISIT(self->type);
  Py_VISIT(self->is_neg);
  return 0;
}

static void deallocate(weight *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Py_XDECREF(self->descriptor);
  Py_XDECREF(self->parts);
  Py_XDECREF(self->dtypes);
  Py_XDECREF(self->type);
  Py_XDECREF(self->requires_grad);
  Py_XDECREF(self->is_neg);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

/* Learns how to view tensors, and on which device they are. Without a type of tensors they
 * cannot be viewed, so there must be none. */
static bool learn_of_tensors(weight *self, PyObject *addresses) {
  const Py_ssize_t parts = PyTuple_Size(self->parts);
  if (self->type == Py_None) {
    if (parts == 0 && PyTuple_Size(addresses) == 0) return true;
    PyErr_SetString(PyExc_ValueError, "type is None; expected no parts and no addresses");
    return false;
  }
  if ((self->exchange = exchange_of(self->type)) == NULL) return false;
  if ((self->is_neg = PyObject_GetAttrString(self->type, "is_neg")) == NULL) return false;
  if ((self->requires_grad = PyUnicode_InternFromString("requires_grad")) == NULL) return false;
  if (parts < 1 || parts > MAX_PARTS || PyTuple_Size(addresses) != parts) {
    PyErr_SetString(PyExc_ValueError, "parts and addresses do not match");
    return false;
  }
  for (Py_ssize_t i = 0; i < parts; i++)
    self->addresses[i] = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, i));
  dl_tensor packed;
  if (PyErr_Occurred() || self->exchange->view(PyTuple_GetItem(self->parts, 0), &packed) != 0)
    return false;
  self->device_type = packed.device_type;
  self->device_id = packed.device_id;
  return true;
}

PyDoc_STRVAR(weight_doc,
             "Weight(descriptor, address, function, elements, dtype, on_device, dtypes, type, "
             "parts, addresses)\n--\n\n"
             "An nf4_tensor or nf4_int4_tensor, at `address` and kept alive by `descriptor`, and "
             "the function of "
             "libnf4 that dequantizes it.\n\n"
             "`dtypes` maps what names a dtype to its nf4_dtype, `dtype` is the weight's. `type` "
             "is torch.Tensor, and `parts` and `addresses` are the weight's tensors and where "
             "their memory is; or None and two empty tuples.");
static PyObject *weight_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  (void)keywords;
  PyObject *descriptor, *dtypes, *tensors, *parts, *addresses;
  unsigned long long address, function;
  long long elements;
  int dtype, on_device;
  if (!PyArg_ParseTuple(arguments, "OKKLipO!OO!O!", &descriptor, &address, &function, &elements,
                        &dtype, &on_device, &PyDict_Type, &dtypes, &tensors, &PyTuple_Type, &parts,
                        &PyTuple_Type, &addresses))
    return NULL;
  weight *self = (weight *)PyType_GenericAlloc(type, 0); /* zeroed */
  if (self == NULL) return NULL;
  self->descriptor = Py_NewRef(descriptor);
  self->dtypes = Py_NewRef(dtypes);
  self->type = Py_NewRef(tensors);
  self->parts = Py_NewRef(parts);
  self->tensor = (const any_weight *)(uintptr_t)address;
  self->function = (uintptr_t)function;
  self->elements = elements;
  self->dtype = dtype;
  self->on_device = on_device;
  if (!learn_of_tensors(self, addresses)) {
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"in_place", (PyCFunction)(void (*)(void))in_place, METH_NOARGS, in_place_doc},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, launch_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot weight_slots[] = {
    {Py_tp_doc, (void *)weight_doc},    {Py_tp_new, (void *)weight_new},
    {Py_tp_traverse, (void *)traverse}, {Py_tp_dealloc, (void *)deallocate},
    {Py_tp_methods, methods},           {0, NULL},
};

static PyType_Spec weight_spec = {
    .name = "_nf4_fast.Weight",
    .basicsize = sizeof(weight),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = weight_slots,
};

static int execute(PyObject *module) {
  PyObject *type = PyType_FromSpec(&weight_spec);
  if (type == NULL) return -1;
  int failed = PyModule_AddObjectRef(module, "Weight", type);
  Py_DECREF(type);
  if (failed == 0) failed = PyModule_AddFunctions(module, nf4_lora_methods);
  return failed != 0 ? failed : PyModule_AddFunctions(module, nf4_grouped_methods);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)execute},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_nf4_fast",
    .m_methods = nf4_operator_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__nf4_fast(void) { return PyModuleDef_Init(&module); }
