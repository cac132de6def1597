// Python's entries for a weight with an adapter, and for the gradients (_nf4_ops.cpp).
#include <optional>

#include "_nf4_blas.hpp"
#include "_nf4_fast.h"
#include "_nf4_python.hpp"

namespace {

using namespace nf4_torch;

// Views the arguments a, b, scale.
bool view_adapter(PyObject *const *given, AdapterViews &views) {
  views.scale = PyFloat_AsDouble(given[2]);
  return PyErr_Occurred() == nullptr && view_of(given[0], views.a) && view_of(given[1], views.b) &&
         !is_negative(given[0]) && !is_negative(given[1]);
}

PyDoc_STRVAR(
    linear_adapted_doc,
    "linear_adapted(x, bias, weight, a, b, scale)\n--\n\n"
    "y = x W^T + bias + scale p B^T and p = x A^T, both new; None if nothing was done, as linear, "
    "and where a dense weight is expected to be faster.");
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
      prefers_dense(product, *x))
    return none();
  const int64_t m = product.args.m, rows = product.weight.rows;
  Outputs made;
  product.args.y = made.take(new_output(arguments[0], *x, rows), *x, m * rows);
  lora.product = made.matrix(arguments[0], *x, m, lora.rank);
  return made.after([&] { multiply_fused(&product, 1, *x); });
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
  const int64_t m = product.args.m, cols = product.weight.cols;
  Outputs made;
  product.args.y = made.take(new_output(arguments[0], *grad_y, cols), *grad_y, m * cols);
  if (adapted) lora.product = made.matrix(arguments[0], *grad_y, m, lora.rank);
  return made.after([&] { multiply_gradient(product, *grad_y); });
}

PyDoc_STRVAR(
    lora_grads_doc,
    "lora_grads(grad_y, x, p, q, a, b, scale)\n--\n\n"
    "On a GPU: dA = scale q^T x and dB = scale dY^T p, both new, in the dtype of a and b, whose "
    "shapes are not looked at; None if nothing was done.");
PyObject *lora_grads(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  if (!count_is(count, 7)) return nullptr;
  PyObject *const *const given_adapter = arguments + 4;
  View views[4];
  for (int i = 0; i < 4; ++i)
    if (!view_of(arguments[i], views[i]) || is_negative(arguments[i])) return none();
  const auto &[grad_y, x, p, q] = views;
  AdapterViews adapter{};
  nf4_lora_grad_args args;
  if (grad_y->device_type != DL_CUDA || !view_adapter(given_adapter, adapter) ||
      !read_lora_grad(*grad_y, *x, *p, adapter, args) || !read_narrow(*q, *grad_y, args, args.q))
    return none();
  Outputs made;
  args.da = made.matrix(given_adapter[0], *adapter.a, args.rank, args.cols);
  args.db = made.matrix(given_adapter[1], *adapter.b, args.rows, args.rank);
  return made.after([&, &first = *grad_y] { launch_lora_grad(args, first); });
}

// One of an adapter's matrices, [rows, cols], in the dtype of x: in place, or in `copy`.
Rows narrowed(const nf4_lora &lora, const void *half, int64_t rows, int64_t cols, int64_t stride,
              const Rows &x, std::optional<Matrix> &copy) {
  if (lora.dtype == x.dtype) return {half, x.dtype, x.device, rows, cols, stride};
  copy.emplace(rows, cols, x.dtype, x.device).round(half, stride);
  return copy->rows();
}

bool can_multiply_dense(const Rows &of_y, const nf4_tensor &weight, const nf4_lora &lora) {
  return can_multiply(of_y) && fits(weight.cols, 1) && fits(lora.a_stride, 1) &&
         fits(lora.b_stride, 1);
}

// dX and q = dY B with a dense weight.
void multiply_dense_gradient(const Product<Codebook> &product, const dl_tensor &grad_y,
                             const Rows &of_y, const nf4_lora &lora, Matrix &q) {
  const nf4_tensor &weight = product.weight;
  std::optional<Matrix> of_a, of_b;
  const Rows a = narrowed(lora, lora.a, lora.rank, weight.cols, lora.a_stride, of_y, of_a);
  const Rows b = narrowed(lora, lora.b, weight.rows, lora.rank, lora.b_stride, of_y, of_b);
  multiply(of_y, b, 1, 0, q.data());
  const Matrix dense(weight.rows, weight.cols, of_y.dtype, of_y.device);
  dequantize_to(dense.data(), grad_y, weight);
  multiply(of_y, dense.rows(), 1, 0, product.args.y);
  multiply(q.rows(), a, lora.scale, 1, product.args.y);
}

PyDoc_STRVAR(adapted_grads_doc,
             "adapted_grads(grad_y, x, p, weight, a, b, scale, fused)\n--\n\n"
             "On a GPU in 16 bits, for y and p of linear_adapted: dX, dA and dB, new; None if "
             "nothing was done. fused: without a dense weight.");
PyObject *adapted_grads(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  if (!count_is(count, 8)) return nullptr;
  PyObject *const *const given_adapter = arguments + 4;
  View grad_y, x, p;
  WeightViews<Codebook> weight{};
  AdapterViews adapter{};
  Product<Codebook> product;
  nf4_lora lora;
  nf4_lora_grad_args grads;
  Rows of_y{};
  if (is_int4(arguments[3]) || !view_plain(arguments[0], grad_y) || !view_of(arguments[1], x) ||
      is_negative(arguments[1]) || !view_of(arguments[2], p) ||
      !view_weight(arguments[3], weight) || read_gradient(*grad_y, weight, product) ||
      !view_adapter(given_adapter, adapter) || read_adapter(adapter, *grad_y, product, lora) ||
      !read_rows(*grad_y, of_y) || !read_lora_grad(*grad_y, *x, *p, adapter, grads))
    return none();
  const int64_t m = grads.m, cols = product.weight.cols;
  const bool fused = arguments[7] == Py_True;
  if (grads.cols != cols || grads.rank != lora.rank ||
      (!fused && !can_multiply_dense(of_y, product.weight, lora)))
    return none();
  Outputs made;
  product.args.y = made.take(new_output(arguments[0], *grad_y, cols), *grad_y, m * cols);
  grads.da = made.matrix(given_adapter[0], *adapter.a, grads.rank, cols);
  grads.db = made.matrix(given_adapter[1], *adapter.b, grads.rows, grads.rank);
  return made.after([&] {
    Matrix q(m, lora.rank, of_y.dtype, of_y.device);
    if (fused) {
      lora.product = q.data();
      multiply_gradient(product, *grad_y);
    } else {
      multiply_dense_gradient(product, *grad_y, of_y, lora, q);
    }
    grads.q = q.data();
    launch_lora_grad(grads, *grad_y);
  });
}

}  // namespace

extern "C" {

PyMethodDef nf4_lora_methods[] = {
    {"linear_adapted", method(linear_adapted), METH_FASTCALL, linear_adapted_doc},
    {"linear_grad", method(linear_grad), METH_FASTCALL, linear_grad_doc},
    {"lora_grads", method(lora_grads), METH_FASTCALL, lora_grads_doc},
    {"adapted_grads", method(adapted_grads), METH_FASTCALL, adapted_grads_doc},
    {nullptr, nullptr, 0, nullptr},
};

}  // extern "C"
