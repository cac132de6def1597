// Products of experts for Python (nf4/torch/_operators_grouped.py): linear_grouped, like linear in
// _nf4_ops.cpp.
#include <Python.h>

#include "_nf4_fast.h"
#include "_nf4_python.hpp"

namespace {

using namespace nf4_torch;

struct Grouped {
  nf4_tensor weight;
  nf4_grouped_args args{};
};

// The first dimension of a weight with three dimensions; -1 for other weights. The last two members
// of a Spec are shape and format.
int64_t experts_of(PyObject *weight) {
  PyObject *spec = PyTuple_GetItem(weight, Codebook::kParts);
  PyObject *shape = spec == nullptr ? nullptr : PyTuple_GetItem(spec, 5);
  if (shape == nullptr || PyTuple_Size(shape) != 3) return -1;
  return PyLong_AsLongLong(PyTuple_GetItem(shape, 0));
}

// Views int32 numbers: one dimension, contiguous, with `count` elements, or any number if that is
// -1.
bool view_numbers(PyObject *given, const dl_tensor &x, int64_t count, View &view) {
  return view_of(given, view) && view->ndim == 1 && is_words(*view) && has_memory(&*view) &&
         beside(*view, x) && is_contiguous(&*view, view->shape[0]) &&
         (count < 0 || view->shape[0] == count);
}

bool view_bias(PyObject *given, const dl_tensor &x, int64_t rows, int64_t experts, View &view) {
  return view_of(given, view) && !is_negative(given) && dtype_of(&*view) == dtype_of(&x) &&
         view->ndim == 2 && view->shape[0] == experts && has_memory(&*view) && beside(*view, x) &&
         is_contiguous(&*view, rows) && elements_of(&*view) == rows;
}

// Fills in everything except y. Returns false if the general way has to handle the call.
bool read_grouped(PyObject *const *given, const dl_tensor &x, Grouped &product) {
  auto &[weight, args] = product;
  WeightViews<Codebook> views{};
  View ends, index, bias;
  const int64_t experts = experts_of(given[4]);
  if (experts < 1 || experts > INT32_MAX || x.ndim != 2 || check_first("x", x)) return false;
  if (!view_weight(given[4], views) || read_weight(views, x, weight)) return false;
  if (weight.rows % experts != 0 || !view_numbers(given[1], x, experts, ends)) return false;
  args.struct_size = sizeof args;
  args.dtype = dtype_of(&x);
  args.experts = static_cast<int32_t>(experts);
  args.x = address_of(&x);
  args.ends = reinterpret_cast<const int32_t *>(address_of(&*ends));
  if (!rows_of(&x, weight.cols, &args.x_rows, &args.x_stride)) return false;
  args.m = args.x_rows;
  if (given[2] != Py_None) {
    if (!view_numbers(given[2], x, -1, index)) return false;
    args.m = index->shape[0];
    args.x_index = reinterpret_cast<const int32_t *>(address_of(&*index));
  }
  args.bias_stride = args.y_stride = weight.rows / experts;
  if (given[3] != Py_None) {
    if (!view_bias(given[3], x, weight.rows, experts, bias)) return false;
    args.bias = address_of(&*bias);
  }
  // An index of no rows may have a NULL address, which would mean that there is no index.
  return args.m > 0;
}

// Alignments of x and of the weight matter as in other products; y is new.
bool prefers_dense(const Grouped &product, const dl_tensor &x) {
  if (x.device_type == DL_CPU) return false;
  thread_local KeptPaths kept;
  const auto &[weight, args] = product;
  PathKey key = key_of(weight);
  key[7] = pair_of(x.device_id, args.dtype);
  key[8] = args.m;
  key[9] = bits_of(args.x) << 8 | bits_of(args.bias);
  key[10] = args.x_stride;
  key[11] = args.experts;
  key[12] = args.x_rows;
  key[13] = bits_of(args.x_index);
  return NF4_PATH_DENSE == kept.find(key, [&] {
    nf4_path path = 0;
    return nf4.grouped_path(&weight, &args, x.device_id, &path) == NF4_STATUS_OK ? path : 0;
  });
}

void multiply_grouped(const Grouped &product, const dl_tensor &x) {
  const auto &[weight, args] = product;
  if (x.device_type == DL_CPU) return require(nf4.grouped_cpu(&weight, &args, threads()));
  size_t needed = 0;
  require(nf4.grouped_workspace_size(&weight, &args, &needed));
  in_workspace(needed, x, [&](void *space, nf4_stream stream) {
    return nf4.grouped_launch(&weight, &args, space, needed, stream);
  });
}

PyDoc_STRVAR(linear_grouped_doc,
             "linear_grouped(x, ends, x_index, bias, weight)\n--\n\n"
             "The products of a stack of experts on torch's current stream, in a new tensor; None "
             "if nothing was done and the call is left to the general way, which knows of dense "
             "experts where these are expected to be faster.");
PyObject *linear_grouped(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  if (!count_is(count, 5)) return nullptr;
  View x;
  Grouped product;
  if (!view_plain(arguments[0], x) || !read_grouped(arguments, *x, product) ||
      prefers_dense(product, *x))
    return none();
  Outputs made;
  product.args.y = made.matrix(arguments[0], *x, product.args.m, product.args.y_stride);
  return made.after([&] { multiply_grouped(product, *x); });
}

}  // namespace

extern "C" {

PyMethodDef nf4_grouped_methods[] = {
    {"linear_grouped", method(linear_grouped), METH_FASTCALL, linear_grouped_doc},
    {nullptr, nullptr, 0, nullptr},
};

}  // extern "C"
