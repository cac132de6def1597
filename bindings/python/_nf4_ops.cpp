// The operators of nf4.torch: one body (_nf4_body.hpp) with two entries. Here is Python's, which
// calls linear and dequantize with a WeightParts or an Int4Parts (nf4/torch/_weight.py,
// _int4_weight.py); torch's dispatcher has the other (_nf4_dispatcher.cpp).
//
// Each entry views its tensors and checks the views (_nf4_checks.hpp). It takes what is common and
// has no fault: for anything else Python gets None and goes the general way.
#include <Python.h>

#include <array>
#include <cstring>
#include <exception>

#include "_nf4_body.hpp"
#include "_nf4_dlpack.h"
#include "_nf4_fast.h"

namespace {

using namespace nf4_torch;

struct Python {
  const dl_exchange *exchange;
  PyObject *tensor, *parameter;  // the types torch.Tensor and torch.nn.Parameter
  PyObject *is_neg, *new_empty;  // names of methods
  PyObject *packed;              // a class of packed bytes, or NULL
} python;

// Leaves the call to the general way, which names what is wrong, if anything is.
PyObject *none() {
  PyErr_Clear();
  Py_RETURN_NONE;
}

// No view tells of torch's negative bit: the numbers are those in memory times -1.
bool is_negative(PyObject *tensor) {
  PyObject *answer = PyObject_CallMethodObjArgs(tensor, python.is_neg, nullptr);
  Py_XDECREF(answer);  // True and False live on
  return answer != Py_False;
}

// A call from here would bypass the __torch_function__ of any other type, so it gets no view.
bool view_of(PyObject *tensor, View &view) {
  PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
  return (type == python.tensor || type == python.parameter) &&
         python.exchange->view(tensor, &view.emplace()) == 0;
}

// Exactly a Tensor, of dense data.
bool view_plain(PyObject *tensor, View &view) {
  return reinterpret_cast<PyObject *>(Py_TYPE(tensor)) == python.tensor && view_of(tensor, view) &&
         !is_negative(tensor);
}

// Packed bytes of the class that take_packed named, whatever their dtype; `bytes` is their number.
bool view_packed(PyObject *tensor, View &view, int64_t &bytes) {
  if (reinterpret_cast<PyObject *>(Py_TYPE(tensor)) != python.packed) return view_of(tensor, view);
  if (python.exchange->view(tensor, &view.emplace()) != 0) return false;
  const int64_t elements = elements_of(&*view);
  if (!is_contiguous(&*view, elements)) return false;
  bytes = elements * view->bits / 8;
  view->ndim = 1;
  view->shape = &bytes;
  view->strides = nullptr;
  view->code = DL_UINT;
  view->bits = 8;
  return true;
}

// Of a WeightParts or an Int4Parts, whose parts have no negative bit.
template <class Kind>
bool view_weight(PyObject *given, WeightViews<Kind> &views) {
  for (int i = 0; i < Kind::kParts; ++i) {
    PyObject *part = PyTuple_GetItem(given, i);
    if (part == nullptr) return false;
    if (part == Py_None) continue;
    View &view = views.parts[i];
    if (!(i == kPacked ? view_packed(part, view, views.packed_bytes) : view_of(part, view)))
      return false;
  }
  PyObject *spec = PyTuple_GetItem(given, Kind::kParts);
  if (spec == nullptr) return false;
  for (size_t i = 0; i < views.spec.size(); ++i) {
    PyObject *number = PyTuple_GetItem(spec, static_cast<Py_ssize_t>(i));
    if (number == nullptr) return false;
    views.spec[i] = PyLong_AsLongLong(number);
  }
  return PyErr_Occurred() == nullptr;
}

bool is_int4(PyObject *weight) { return PyTuple_Size(weight) == Int4::kParts + 1; }

bool count_is(Py_ssize_t count, Py_ssize_t expected) {
  if (count == expected) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments; expected %zd", count, expected);
  return false;
}

bool is_output(const dl_tensor &out, const dl_tensor &x, int64_t elements) {
  return beside(out, x) && has_memory(&out) && dtype_of(&out) == dtype_of(&x) &&
         elements_of(&out) == elements && is_contiguous(&out, elements);
}

// A new y beside x, of sizes that torch gets as they are.
PyObject *new_beside(PyObject *x, PyObject *sizes) {
  if (sizes == nullptr) return nullptr;
  PyObject *y = PyObject_CallMethodObjArgs(x, python.new_empty, sizes, nullptr);
  Py_DECREF(sizes);
  return y;
}

// The same, [..., rows].
PyObject *new_output(PyObject *x, const dl_tensor &of_x, int64_t rows) {
  const Py_ssize_t last = of_x.ndim - 1;
  PyObject *sizes = PyTuple_New(of_x.ndim);
  for (Py_ssize_t i = 0; sizes != nullptr && i <= last; ++i) {
    PyObject *size = PyLong_FromLongLong(i < last ? of_x.shape[i] : rows);
    if (size == nullptr || PyTuple_SetItem(sizes, i, size) != 0) Py_CLEAR(sizes);
  }
  return new_beside(x, sizes);
}

// Runs `work` without the GIL. False if it threw: the general way finds the words.
template <class Work>
bool run(const Work &work) {
  bool done = true;
  Py_BEGIN_ALLOW_THREADS try { work(); } catch (const std::exception &) {
    done = false;
  }
  Py_END_ALLOW_THREADS return done;
}

bool is_slow(const dl_tensor &x, const nf4_matmul_args &args, int fp32_rows) {
  return x.device_type == DL_CUDA && args.dtype == NF4_DTYPE_FP32 && args.m > fp32_rows;
}

// None if nothing was done.
template <class Kind>
PyObject *linear_of(PyObject *given_x, PyObject *given_bias, PyObject *given) {
  View x, bias, of_y;
  WeightViews<Kind> weight{};
  Product<Kind> product;
  if (!view_plain(given_x, x)) return none();
  if (given_bias != Py_None && (!view_of(given_bias, bias) || is_negative(given_bias)))
    return none();
  if (!view_weight(given, weight) || read_product(*x, bias, weight, product)) return none();
  if (is_slow(*x, product.args, Kind::kFp32Rows)) return none();
  PyObject *y = new_output(given_x, *x, product.weight.rows);
  if (y == nullptr) return nullptr;
  // A mode of torch may have made something else.
  if (view_of(y, of_y) && is_output(*of_y, *x, product.args.m * product.weight.rows)) {
    product.args.y = const_cast<char *>(address_of(&*of_y));
    if (run([&] { multiply(&product, 1, *x); })) return y;
  }
  Py_DECREF(y);
  return none();
}

template <class Kind>
bool dequantize_of(PyObject *given_out, PyObject *given) {
  View out;
  WeightViews<Kind> views{};
  typename Kind::Descriptor weight;
  return view_plain(given_out, out) && view_weight(given, views) && !check_first("out", *out) &&
         !read_weight(views, *out, weight) && elements_of(&*out) == weight.rows * weight.cols &&
         is_contiguous(&*out, elements_of(&*out)) &&
         run([&] { dequantize_to(const_cast<char *>(address_of(&*out)), *out, weight); });
}

PyDoc_STRVAR(
    linear_doc,
    "linear(x, bias, weight)\n--\n\n"
    "y = x W^T + bias on torch's current stream, in a new tensor; None if nothing was done "
    "and the call is left to the general way.");
PyObject *linear(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  if (!count_is(count, 3)) return nullptr;
  const auto of_kind = is_int4(arguments[2]) ? linear_of<Int4> : linear_of<Codebook>;
  return of_kind(arguments[0], arguments[1], arguments[2]);
}

PyDoc_STRVAR(dequantize_doc,
             "dequantize(out, weight)\n--\n\n"
             "Writes the weight to a contiguous tensor on torch's current stream. False if nothing "
             "was done and the call is left to the general way.");
PyObject *dequantize(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  if (!count_is(count, 2)) return nullptr;
  const auto of_kind = is_int4(arguments[1]) ? dequantize_of<Int4> : dequantize_of<Codebook>;
  const bool done = of_kind(arguments[0], arguments[1]);
  PyErr_Clear();
  return PyBool_FromLong(done);
}

// ---- With an adapter, and the gradient ------------------------------------------------

// What a call writes: y, [..., columns], and with an adapter its product, [m, rank].
class Outputs {
 public:
  Outputs(PyObject *x, const dl_tensor &of_x, int64_t columns, Product<Codebook> &product,
          nf4_lora *lora) {
    nf4_matmul_args &args = product.args;
    y_ = new_output(x, of_x, columns);
    if (y_ == nullptr) return;
    if (lora != nullptr)
      p_ = new_beside(x, Py_BuildValue("(LL)", static_cast<long long>(args.m),
                                       static_cast<long long>(lora->rank)));
    allocated_ = lora == nullptr || p_ != nullptr;
    good_ = allocated_ && is_made(y_, of_x, args.m * columns, args.y) &&
            (lora == nullptr || is_made(p_, of_x, args.m * lora->rank, lora->product));
  }
  ~Outputs() {
    Py_XDECREF(y_);
    Py_XDECREF(p_);
  }
  Outputs(const Outputs &) = delete;
  Outputs &operator=(const Outputs &) = delete;

  // What `work` wrote; None if nothing was done; NULL, with torch's error, without memory for it.
  template <class Work>
  PyObject *after(const Work &work) const {
    if (!allocated_) return nullptr;
    return good_ && run(work) ? result() : none();
  }

 private:
  PyObject *result() const { return p_ == nullptr ? Py_NewRef(y_) : PyTuple_Pack(2, y_, p_); }

  static bool is_made(PyObject *made, const dl_tensor &x, int64_t elements, void *&data) {
    View view;
    if (!view_of(made, view) || !is_output(*view, x, elements)) return false;
    data = const_cast<char *>(address_of(&*view));
    return true;
  }

  PyObject *y_ = nullptr, *p_ = nullptr;
  bool allocated_ = false, good_ = false;
};

// Of the arguments a, b, scale.
bool view_adapter(PyObject *const *given, AdapterViews &views) {
  views.scale = PyFloat_AsDouble(given[2]);
  return PyErr_Occurred() == nullptr && view_of(given[0], views.a) && view_of(given[1], views.b) &&
         !is_negative(given[0]) && !is_negative(given[1]);
}

PyDoc_STRVAR(
    linear_adapted_doc,
    "linear_adapted(x, bias, weight, a, b, scale)\n--\n\n"
    "y = x W^T + bias + scale p B^T and p = x A^T, both new; None if nothing was done, as linear.");
PyObject *linear_adapted(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  if (!count_is(count, 6)) return nullptr;
  PyObject *const given_bias = arguments[1];
  View x, bias;
  WeightViews<Codebook> weight{};
  AdapterViews adapter{};
  Product<Codebook> product;
  nf4_lora lora;
  if (is_int4(arguments[2]) || !view_plain(arguments[0], x)) return none();
  if (given_bias != Py_None && (!view_of(given_bias, bias) || is_negative(given_bias)))
    return none();
  if (!view_weight(arguments[2], weight) || !view_adapter(arguments + 3, adapter) ||
      read_product(*x, bias, weight, product) || read_adapter(adapter, *x, product, lora) ||
      is_slow(*x, product.args, Codebook::kFp32Rows))
    return none();
  const Outputs made(arguments[0], *x, product.weight.rows, product, &lora);
  return made.after([&] { multiply(&product, 1, *x); });
}

PyDoc_STRVAR(linear_grad_doc,
             "linear_grad(grad_y, weight, a=None, b=None, scale=1.0)\n--\n\n"
             "dX = dY W, new; with an adapter dX = dY W + scale q A and q = dY B. None if nothing "
             "was done, as linear.");
PyObject *linear_grad(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  const bool adapted = count == 5;
  if (!adapted && !count_is(count, 2)) return nullptr;
  View grad_y;
  WeightViews<Codebook> weight{};
  AdapterViews adapter{};
  Product<Codebook> product;
  nf4_lora lora;
  if (is_int4(arguments[1]) || !view_plain(arguments[0], grad_y) ||
      !view_weight(arguments[1], weight) || read_gradient(*grad_y, weight, product))
    return none();
  if (adapted &&
      (!view_adapter(arguments + 2, adapter) || read_adapter(adapter, *grad_y, product, lora)))
    return none();
  const Outputs made(arguments[0], *grad_y, product.weight.cols, product,
                     adapted ? &lora : nullptr);
  return made.after([&] { multiply_gradient(product, *grad_y); });
}

PyDoc_STRVAR(take_packed_doc,
             "take_packed(class)\n--\n\n"
             "Makes linear and dequantize take packed bytes of this class of tensors, too, in any "
             "dtype. It has memory of its own, and its __torch_function__ is not called.");
PyObject *take_packed(PyObject *, PyObject *kind) {
  Py_XDECREF(python.packed);
  python.packed = Py_NewRef(kind);
  Py_RETURN_NONE;
}

// ---- Registration --------------------------------------------------------------------

// Fills in a struct of functions from a sequence of their addresses.
template <class Functions>
bool fill(PyObject *addresses, Functions &functions) {
  constexpr size_t kCount = sizeof(Functions) / sizeof(void *);
  std::array<void *, kCount> found;
  if (PySequence_Size(addresses) != static_cast<Py_ssize_t>(kCount)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a wrong number of addresses");
    return false;
  }
  for (size_t i = 0; i < kCount; ++i) {
    PyObject *item = PySequence_GetItem(addresses, static_cast<Py_ssize_t>(i));
    if (item == nullptr) return false;
    found[i] = PyLong_AsVoidPtr(item);
    Py_DECREF(item);
    if (PyErr_Occurred()) return false;
  }
  std::memcpy(&functions, found.data(), sizeof functions);
  return true;
}

PyObject *names(const char *const *first, size_t count) {
  PyObject *made = PyTuple_New(static_cast<Py_ssize_t>(count));
  for (size_t i = 0; made != nullptr && i < count; ++i) {
    PyObject *name = PyUnicode_FromString(first[i]);
    if (name == nullptr || PyTuple_SetItem(made, static_cast<Py_ssize_t>(i), name) != 0)
      Py_CLEAR(made);
  }
  return made;
}

PyDoc_STRVAR(functions_doc,
             "operator_functions()\n--\n\n"
             "The names of the functions that register_operators needs: libtorch's and libnf4's.");
PyObject *functions(PyObject *, PyObject *) {
  return Py_BuildValue("NN", names(kTorch.data(), kTorch.size()), names(kNf4.data(), kNf4.size()));
}

PyDoc_STRVAR(register_doc,
             "register_operators(tensor, parameter, torch, nf4)\n--\n\n"
             "Makes linear and dequantize work, and registers kernels for operators that are "
             "defined: by the types torch.Tensor and torch.nn.Parameter and by the addresses of "
             "functions. The last of torch's may be 0: it has no CUDA then. Call it once.");
PyObject *register_operators(PyObject *, PyObject *arguments) {
  PyObject *tensor, *parameter, *of_torch, *of_nf4;
  if (!PyArg_ParseTuple(arguments, "OOOO", &tensor, &parameter, &of_torch, &of_nf4)) return nullptr;
  if (!fill(of_torch, torch) || !fill(of_nf4, nf4)) return nullptr;
  python = {exchange_of(tensor),
            Py_NewRef(tensor),
            Py_NewRef(parameter),
            PyUnicode_InternFromString("is_neg"),
            PyUnicode_InternFromString("new_empty"),
            nullptr};
  if (python.exchange == nullptr || PyErr_Occurred()) return nullptr;
  codes = {torch.uint8(),    torch.int32(), torch.float32(), torch.float16(),
           torch.bfloat16(), torch.cpu(),   torch.cuda()};
  if (!implement("CPU") || (torch.cuda_stream != nullptr && !implement("CUDA"))) {
    PyErr_SetString(PyExc_RuntimeError, "torch does not take the operators");
    return nullptr;
  }
  Py_RETURN_NONE;
}

template <class Function>
PyCFunction method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

extern "C" {

PyMethodDef nf4_operator_methods[] = {
    {"linear", method(linear), METH_FASTCALL, linear_doc},
    {"dequantize", method(dequantize), METH_FASTCALL, dequantize_doc},
    {"linear_adapted", method(linear_adapted), METH_FASTCALL, linear_adapted_doc},
    {"linear_grad", method(linear_grad), METH_FASTCALL, linear_grad_doc},
    {"take_packed", take_packed, METH_O, take_packed_doc},
    {"operator_functions", functions, METH_NOARGS, functions_doc},
    {"register_operators", register_operators, METH_VARARGS, register_doc},
    {nullptr, nullptr, 0, nullptr},
};

}  // extern "C"
