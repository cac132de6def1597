// Helpers that the entries for Python share (_nf4_ops.cpp, _nf4_lora.cpp, _nf4_grouped.cpp): views
// of Python's tensors and weights, and new tensors on their device.
#ifndef NF4_PYTHON_HPP
#define NF4_PYTHON_HPP

#include <Python.h>

#include <algorithm>
#include <array>
#include <exception>
#include <memory>

#include "_nf4_body.hpp"
#include "_nf4_dlpack.h"

namespace nf4_torch {

// A strong reference, or none.
struct Release {
  void operator()(PyObject *object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

struct Python {
  const dl_exchange *exchange;
  PyObject *tensor, *parameter;       // the types torch.Tensor and torch.nn.Parameter
  PyObject *is_neg, *new_empty;       // names of methods
  PyObject *requires_grad, *version;  // names of attributes
  std::array<PyObject *, 2> packed;   // classes of packed bytes, then NULL
  // Names of attributes of bitsandbytes' QuantState.
  PyObject *packing_format_for_cpu, *state2, *offset, *absmax, *code, *blocksize, *shape,
      *quant_type;
};
inline Python python;

// Leaves the call to the general way, which words the error, if there is one.
inline PyObject *none() {
  PyErr_Clear();
  Py_RETURN_NONE;
}

// Checks torch's negative bit, which no view shows: the numbers are those in memory times -1.
inline bool is_negative(PyObject *tensor) {
  PyObject *answer = PyObject_CallMethodObjArgs(tensor, python.is_neg, nullptr);
  Py_XDECREF(answer);  // True and False are never freed
  return answer != Py_False;
}

// A call from here would bypass the __torch_function__ of any other type, so other types get no
// view.
inline bool view_of(PyObject *tensor, View &view) {
  PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
  return (type == python.tensor || type == python.parameter) &&
         python.exchange->view(tensor, &view.emplace()) == 0;
}

// Views a tensor that is exactly a Tensor of dense data.
inline bool view_plain(PyObject *tensor, View &view) {
  return reinterpret_cast<PyObject *>(Py_TYPE(tensor)) == python.tensor && view_of(tensor, view) &&
         !is_negative(tensor);
}

inline bool is_packed(PyObject *type) {
  return std::find(python.packed.begin(), python.packed.end(), type) != python.packed.end();
}

// Views packed bytes of a class that take_packed named, whatever their dtype; `bytes` is their
// number.
inline bool view_packed(PyObject *tensor, View &view, int64_t &bytes) {
  if (!is_packed(reinterpret_cast<PyObject *>(Py_TYPE(tensor)))) return view_of(tensor, view);
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

// Integers cannot require grad, and are not asked. If there is no answer, the general way must be
// taken, as if the tensor required it.
inline bool requires_grad(PyObject *tensor, const dl_tensor &view) {
  if (view.code == DL_UINT || view.code == DL_INT) return false;
  PyObject *answer = PyObject_GetAttr(tensor, python.requires_grad);
  Py_XDECREF(answer);  // True and False are never freed
  return answer != Py_False;
}

// Views a WeightParts or an Int4Parts, whose parts have no negative bit. A part that requires grad
// gets no view, as the general way refuses it; one of a class of take_packed is not asked.
template <class Kind>
inline bool view_weight(PyObject *given, WeightViews<Kind> &views) {
  for (int i = 0; i < Kind::kParts; ++i) {
    PyObject *part = PyTuple_GetItem(given, i);
    if (part == nullptr) return false;
    if (part == Py_None) continue;
    View &view = views.parts[i];
    if (!(i == kPacked ? view_packed(part, view, views.packed_bytes) : view_of(part, view)))
      return false;
    if (requires_grad(part, *view)) return false;
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

inline bool is_int4(PyObject *weight) { return PyTuple_Size(weight) == Int4::kParts + 1; }

inline bool count_is(Py_ssize_t count, Py_ssize_t expected) {
  if (count == expected) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments; expected %zd", count, expected);
  return false;
}

inline bool is_output(const dl_tensor &out, const dl_tensor &x, int64_t elements) {
  return beside(out, x) && has_memory(&out) && dtype_of(&out) == dtype_of(&x) &&
         elements_of(&out) == elements && is_contiguous(&out, elements);
}

// A new y on the device of x, from a tuple of sizes. They are passed one by one: given a tuple,
// torch first tries whether it is an integer and drops the TypeError, which takes half as long as
// making y.
inline PyObject *new_beside(PyObject *x, PyObject *given_sizes) {
  const Owned sizes(given_sizes);
  const Owned new_empty(sizes ? PyObject_GetAttr(x, python.new_empty) : nullptr);
  return new_empty ? PyObject_Call(new_empty.get(), sizes.get(), nullptr) : nullptr;
}

// The same with the shape [..., rows].
inline PyObject *new_output(PyObject *x, const dl_tensor &of_x, int64_t rows) {
  const Py_ssize_t last = of_x.ndim - 1;
  PyObject *sizes = PyTuple_New(of_x.ndim);
  for (Py_ssize_t i = 0; sizes != nullptr && i <= last; ++i) {
    PyObject *size = PyLong_FromLongLong(i < last ? of_x.shape[i] : rows);
    if (size == nullptr || PyTuple_SetItem(sizes, i, size) != 0) Py_CLEAR(sizes);
  }
  return new_beside(x, sizes);
}

// Runs `work` without the GIL. Returns false if it threw: the general way then words the error.
template <class Work>
inline bool run(const Work &work) {
  bool done = true;
  Py_BEGIN_ALLOW_THREADS try { work(); } catch (const std::exception &) {
    done = false;
  }
  Py_END_ALLOW_THREADS return done;
}

// The new tensors to which a call writes.
class Outputs {
 public:
  Outputs() = default;
  ~Outputs() {
    for (PyObject *each : made_) Py_XDECREF(each);
  }
  Outputs(const Outputs &) = delete;
  Outputs &operator=(const Outputs &) = delete;

  // The memory of `made`, a new reference, or NULL. It must have `elements` elements of the dtype
  // of `like` and be on its device; a mode of torch may have made a different tensor.
  void *take(PyObject *made, const dl_tensor &like, int64_t elements) {
    View view;
    made_.at(count_++) = made;
    allocated_ = allocated_ && made != nullptr;
    good_ = good_ && made != nullptr && view_of(made, view) && is_output(*view, like, elements);
    return good_ ? const_cast<char *>(address_of(&*view)) : nullptr;
  }

  void *matrix(PyObject *like, const dl_tensor &of_like, int64_t rows, int64_t cols) {
    if (!good_) return nullptr;
    PyObject *const sizes =
        Py_BuildValue("(LL)", static_cast<long long>(rows), static_cast<long long>(cols));
    return take(new_beside(like, sizes), of_like, rows * cols);
  }

  // Returns the outputs of `work`; None if nothing was done; NULL, with torch's error, if there is
  // no memory for them.
  template <class Work>
  PyObject *after(const Work &work) const {
    if (!allocated_) return nullptr;
    if (!good_ || !run(work)) return none();
    if (count_ == 1) return Py_NewRef(made_[0]);
    return count_ == 2 ? PyTuple_Pack(2, made_[0], made_[1])
                       : PyTuple_Pack(3, made_[0], made_[1], made_[2]);
  }

 private:
  std::array<PyObject *, 3> made_{};
  size_t count_ = 0;
  bool allocated_ = true, good_ = true;
};

// Casts a function for a PyMethodDef.
template <class Function>
PyCFunction method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace nf4_torch

#endif
