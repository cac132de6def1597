// Python's entries for an adapter beside a weight, and for the gradients (_nf4_ops.cpp).
#include "_nf4_blas.hpp"
#include "_nf4_fast.h"
#include "_nf4_python.hpp"

namespace {

using namespace nf4_torch;

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

PyDoc_STRVAR(adapter_grad_doc,
             "adapter_grad(left, right, scale, like)\n--\n\n"
             "scale left^T right, both [..., columns] of 16 bits on a GPU, in the dtype of `like`, "
             "new; None "
             "if nothing was done.");
PyObject *adapter_grad(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  if (!count_is(count, 4)) return nullptr;
  View left, right, like, of_made;
  Rows l{}, r{};
  const double scale = PyFloat_AsDouble(arguments[2]);
  if (PyErr_Occurred() || !view_of(arguments[0], left) || !view_of(arguments[1], right) ||
      !view_of(arguments[3], like) || is_negative(arguments[0]) || is_negative(arguments[1]) ||
      !read_rows(*left, l) || !read_rows(*right, r) || !beside(*like, *left))
    return none();
  const nf4_dtype dtype = dtype_of(&*like);
  if (!can_multiply(l, r, dtype)) return none();
  PyObject *made = new_beside(arguments[3], Py_BuildValue("(LL)", static_cast<long long>(l.cols),
                                                          static_cast<long long>(r.cols)));
  if (made == nullptr) return nullptr;
  if (view_of(made, of_made) && is_output(*of_made, *like, l.cols * r.cols) && run([&] {
        void *const out = const_cast<char *>(address_of(&*of_made));
        transposed_product(l, r, static_cast<float>(scale), out, dtype);
      }))
    return made;
  Py_DECREF(made);
  return none();
}

}  // namespace

extern "C" {

PyMethodDef nf4_lora_methods[] = {
    {"linear_adapted", method(linear_adapted), METH_FASTCALL, linear_adapted_doc},
    {"linear_grad", method(linear_grad), METH_FASTCALL, linear_grad_doc},
    {"adapter_grad", method(adapter_grad), METH_FASTCALL, adapter_grad_doc},
    {nullptr, nullptr, 0, nullptr},
};

}  // extern "C"
