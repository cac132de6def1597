// The operators of nf4.torch: one body (_nf4_body.hpp) with two entries. This file has Python's
// entry, which calls linear and dequantize with a WeightParts or an Int4Parts
// (nf4/torch/_weight.py, _int4_weight.py), and the functions of _nf4_lora.cpp and _nf4_grouped.cpp.
// torch's dispatcher has the other entry (_nf4_dispatcher.cpp).
//
// Each entry views its tensors and checks the views (_nf4_checks.hpp). It handles common calls
// without faults; for anything else Python gets None and takes the general way.
#include <Python.h>

#include <array>
#include <cstring>

#include "_nf4_blas.hpp"
#include "_nf4_fast.h"
#include "_nf4_python.hpp"

namespace {

using namespace nf4_torch;

// Returns None if nothing was done. `peer`, if not NULL, is called with the three arguments if a
// dense weight is expected to be faster; its result is returned unless it is None.
template <class Kind>
PyObject *linear_of(PyObject *const *given, PyObject *peer) {
  PyObject *const given_x = given[0], *const given_bias = given[1];
  View x, bias, of_y;
  WeightViews<Kind> weight{};
  Product<Kind> product;
  if (!view_plain(given_x, x)) return none();
  if (given_bias != Py_None && (!view_of(given_bias, bias) || is_negative(given_bias)))
    return none();
  if (!view_weight(given[2], weight) || read_product(*x, bias, weight, product)) return none();
  if (peer != nullptr && prefers_dense(product, *x)) {
    PyObject *const y = PyObject_CallFunctionObjArgs(peer, given_x, given_bias, given[2], nullptr);
    if (y != Py_None) return y;
    Py_DECREF(y);
  }
  PyObject *y = new_output(given_x, *x, product.weight.rows);
  if (y == nullptr) return nullptr;
  // A mode of torch may have made a different tensor.
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
    "linear(x, bias, weight, peer=None)\n--\n\n"
    "y = x W^T + bias on torch's current stream, in a new tensor; None if nothing was done "
    "and the call is left to the general way. peer(x, bias, weight) is called where a dense weight "
    "is expected to be faster than libnf4's kernel; what it returns is returned, unless that is "
    "None.");
PyObject *linear(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 4 && !count_is(count, 3)) return nullptr;
  PyObject *const peer = count == 4 && arguments[3] != Py_None ? arguments[3] : nullptr;
  const auto of_kind = is_int4(arguments[2]) ? linear_of<Int4> : linear_of<Codebook>;
  return of_kind(arguments, peer);
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

PyDoc_STRVAR(
    versions_doc,
    "versions(tensors)\n--\n\n"
    "A number that each write in place to one of these tensors increases. Of a tuple, which "
    "may have None, and whose last item is left out.");
PyObject *versions(PyObject *, PyObject *tensors) {
  const Py_ssize_t count = PyTuple_Size(tensors) - 1;
  long long sum = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *const tensor = PyTuple_GetItem(tensors, i);
    if (tensor == Py_None) continue;
    const Owned version(PyObject_GetAttr(tensor, python.version));
    if (!version) return nullptr;
    sum += PyLong_AsLongLong(version.get());
  }
  return PyErr_Occurred() ? nullptr : PyLong_FromLongLong(sum);
}

PyDoc_STRVAR(take_packed_doc,
             "take_packed(class)\n--\n\n"
             "Makes linear and dequantize take packed bytes of this class of tensors, too, in any "
             "dtype. It has memory of its own, and its __torch_function__ is not called. Of "
             "several classes the first and the last are taken.");
PyObject *take_packed(PyObject *, PyObject *kind) {
  if (is_packed(kind)) Py_RETURN_NONE;
  PyObject *&place = python.packed[python.packed[0] == nullptr ? 0 : 1];
  Py_XDECREF(place);
  place = Py_NewRef(kind);
  Py_RETURN_NONE;
}

// ---- bitsandbytes' weights ----------------------------------------------------------

// Returns NULL if the dict of an object lacks the name.
Owned attribute(const Owned &of_object, PyObject *name) {
  return Owned(Py_XNewRef(PyDict_GetItemWithError(of_object.get(), name)));
}

// Returns NULL without an exception for states that only bitsandbytes understands.
PyObject *parts_of_state(PyObject *packed, PyObject *state, PyObject *spec_of) {
  // A QuantState has a __getattr__, which makes its attributes slow.
  const Owned own(PyObject_GenericGetDict(state, nullptr));
  if (!own) return nullptr;
  const Owned repacked = attribute(own, python.packing_format_for_cpu);
  if (repacked && PyObject_IsTrue(repacked.get()) != 0) return nullptr;
  const Owned outer = attribute(own, python.state2), absmax = attribute(own, python.absmax),
              shape = attribute(own, python.shape), quant_type = attribute(own, python.quant_type),
              blocksize = attribute(own, python.blocksize);
  if (!outer || !absmax || !shape || !quant_type || !blocksize) return nullptr;
  Owned nested_absmax(Py_NewRef(Py_None)), code(Py_NewRef(Py_None)), offset(Py_NewRef(Py_None)),
      nested_blocksize(PyLong_FromLong(0));
  if (outer.get() != Py_None) {
    const Owned of_outer(PyObject_GenericGetDict(outer.get(), nullptr));
    if (!of_outer) return nullptr;
    nested_absmax = attribute(of_outer, python.absmax);
    code = attribute(of_outer, python.code);
    offset = attribute(own, python.offset);
    nested_blocksize = attribute(of_outer, python.blocksize);
  }
  if (!nested_absmax || !code || !offset || !nested_blocksize) return nullptr;
  const Owned numbers(
      PyTuple_Pack(4, shape.get(), quant_type.get(), blocksize.get(), nested_blocksize.get()));
  const Owned spec(numbers ? PyObject_Call(spec_of, numbers.get(), nullptr) : nullptr);
  if (!spec || spec.get() == Py_None) return nullptr;
  return PyTuple_Pack(7, packed, absmax.get(), nested_absmax.get(), code.get(), offset.get(),
                      Py_None, spec.get());
}

PyDoc_STRVAR(state_parts_doc,
             "state_parts(packed, state, spec_of)\n--\n\n"
             "The fields of a WeightParts of a bitsandbytes QuantState, whose Spec is "
             "spec_of(shape, quant_type, blocksize, nested_blocksize); None if that is None, and "
             "for a state without what is read or with a KeyError or TypeError in it.");
PyObject *state_parts(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
  if (!count_is(count, 3)) return nullptr;
  if (python.tensor == nullptr) return none();  // nothing is registered
  PyObject *made = parts_of_state(arguments[0], arguments[1], arguments[2]);
  if (made != nullptr) return made;
  // A list as the shape, for instance, has no hash.
  const bool is_left = !PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_KeyError) ||
                       PyErr_ExceptionMatches(PyExc_TypeError);
  return is_left ? none() : nullptr;
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
             "The names of the functions that register_operators needs: libtorch's, libnf4's, and "
             "those of cuBLAS and libtorch by which adapted_grads multiplies by a dense weight.");
PyObject *functions(PyObject *, PyObject *) {
  return Py_BuildValue("NNN", names(kTorch.data(), kTorch.size()), names(kNf4.data(), kNf4.size()),
                       names(kBlas.data(), kBlas.size()));
}

PyDoc_STRVAR(register_doc,
             "register_operators(tensor, parameter, torch, nf4, blas)\n--\n\n"
             "Makes linear and dequantize work, and registers kernels for operators that are "
             "defined: by the types torch.Tensor and torch.nn.Parameter and by the addresses of "
             "functions. The last of torch's may be 0, and `blas` empty: torch has no CUDA then. "
             "Call it once.");
PyObject *register_operators(PyObject *, PyObject *arguments) {
  PyObject *tensor, *parameter, *of_torch, *of_nf4, *of_blas;
  if (!PyArg_ParseTuple(arguments, "OOOOO", &tensor, &parameter, &of_torch, &of_nf4, &of_blas))
    return nullptr;
  if (!fill(of_torch, torch) || !fill(of_nf4, nf4)) return nullptr;
  if (PySequence_Size(of_blas) != 0 && !fill(of_blas, blas)) return nullptr;
  const auto name = PyUnicode_InternFromString;
  python = {exchange_of(tensor),
            Py_NewRef(tensor),
            Py_NewRef(parameter),
            name("is_neg"),
            name("new_empty"),
            name("requires_grad"),
            name("_version"),
            {},
            name("packing_format_for_cpu"),
            name("state2"),
            name("offset"),
            name("absmax"),
            name("code"),
            name("blocksize"),
            name("shape"),
            name("quant_type")};
  if (python.exchange == nullptr || PyErr_Occurred()) return nullptr;
  codes = {torch.uint8(),    torch.int32(), torch.float32(), torch.float16(),
           torch.bfloat16(), torch.cpu(),   torch.cuda()};
  if (!implement("CPU") || (torch.cuda_stream != nullptr && !implement("CUDA"))) {
    PyErr_SetString(PyExc_RuntimeError, "torch does not take the operators");
    return nullptr;
  }
  Py_RETURN_NONE;
}

}  // namespace

extern "C" {

PyMethodDef nf4_operator_methods[] = {
    {"linear", method(linear), METH_FASTCALL, linear_doc},
    {"dequantize", method(dequantize), METH_FASTCALL, dequantize_doc},
    {"state_parts", method(state_parts), METH_FASTCALL, state_parts_doc},
    {"versions", versions, METH_O, versions_doc},
    {"take_packed", take_packed, METH_O, take_packed_doc},
    {"operator_functions", functions, METH_NOARGS, functions_doc},
    {"register_operators", register_operators, METH_VARARGS, register_doc},
    {nullptr, nullptr, 0, nullptr},
};

}  // extern "C"
