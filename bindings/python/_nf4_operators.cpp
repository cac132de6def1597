// torch.ops.nf4._linear and ._dense_like (nf4/torch/_native.py) for torch's dispatcher to call
// without Python, which a compiled graph does. An argument that is not as an operator expects it is
// an exception, which torch hands to Python as a ValueError; nf4.torch looks at all of them when a
// graph is made.
#include <Python.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "_nf4_dlpack.h"
#include "_nf4_fast.h"
#include "_nf4_torch.hpp"
#include "nf4/nf4.h"

namespace {

using namespace nf4_torch;

// ---- libnf4 --------------------------------------------------------------------

struct Nf4 {
  decltype(&nf4_dequant_launch) dequant_launch;
  decltype(&nf4_dequant_cpu) dequant_cpu;
  decltype(&nf4_matmul_launch) matmul_launch;
  decltype(&nf4_matmul_cpu) matmul_cpu;
  decltype(&nf4_matmul_workspace_size) matmul_workspace_size;
  decltype(&nf4_last_error) last_error;
} nf4;

constexpr std::array kNf4{"nf4_dequant_launch", "nf4_dequant_cpu",           "nf4_matmul_launch",
                          "nf4_matmul_cpu",     "nf4_matmul_workspace_size", "nf4_last_error"};
static_assert(sizeof(Nf4) == kNf4.size() * sizeof(void *));

void require(nf4_status status) {
  if (status == NF4_STATUS_OK) return;
  const std::string why = std::string("libnf4: ") + nf4.last_error();
  if (status == NF4_STATUS_INVALID_ARGUMENT) throw std::invalid_argument(why);
  throw std::runtime_error(why);
}

bool together(const dl_tensor &one, const dl_tensor &other) {
  return one.device_type == other.device_type && one.device_id == other.device_id;
}

int32_t narrowed(const char *name, Value value, int32_t least) {
  const auto wide = static_cast<int64_t>(value);
  if (wide < least || wide > INT32_MAX) refuse(name, std::to_string(least) + " to 2^31 - 1");
  return static_cast<int32_t>(wide);
}

// ---- A weight ------------------------------------------------------------------

// The last eleven arguments of an operator. Takes the tensors over, all of them before anything is
// refused.
class Weight {
 public:
  static constexpr uint64_t kArguments = 11;

  explicit Weight(const Value *stack)
      : packed_(taken(stack[0])),
        absmax_(taken(stack[1])),
        nested_absmax_(taken_if_any(stack[2])),
        nested_code_(taken_if_any(stack[3])),
        nested_offset_(taken_if_any(stack[4])),
        codebook_(taken_if_any(stack[5])) {
    std::copy_n(stack + 6, layout_.size(), layout_.begin());
  }

  // Its parts are where this tensor is.
  const nf4_tensor *beside(const dl_tensor &other) {
    read_layout();
    const int64_t elements = tensor_.rows * tensor_.cols;
    const int64_t blocks = divide_up(elements, tensor_.blocksize);
    const bool nested = tensor_.nested_blocksize != 0;
    const auto part = [&](const char *name, const Tensor &given, int64_t count, bool bytes) {
      if (!given) refuse(name, "a tensor, as the weight is nested");
      const dl_tensor view = given.view(name);
      if (!is_part(&view, count, bytes) || !together(view, other))
        refuse(name, std::to_string(count) + " contiguous elements where the others are");
      return view.data;
    };
    const auto floats = [&](const char *name, const Tensor &given, int64_t count) {
      return static_cast<float *>(part(name, given, count, false));
    };
    tensor_.packed = static_cast<uint8_t *>(part("packed", packed_, divide_up(elements, 2), true));
    tensor_.absmax = part("absmax", absmax_, blocks, nested);
    if (nested) {
      const int64_t scales = divide_up(blocks, tensor_.nested_blocksize);
      tensor_.nested_absmax = floats("nested_absmax", nested_absmax_, scales);
      tensor_.nested_code = floats("nested_code", nested_code_, 256);
      tensor_.nested_offset = floats("nested_offset", nested_offset_, 1);
    }
    if (codebook_) tensor_.codebook = floats("codebook", codebook_, 16);
    return &tensor_;
  }

 private:
  void read_layout() {
    const auto [rows, cols, format, blocksize, nested_blocksize] = layout_;
    tensor_.struct_size = sizeof tensor_;
    tensor_.rows = static_cast<int64_t>(rows);
    tensor_.cols = static_cast<int64_t>(cols);
    if (tensor_.rows < 0 || tensor_.cols < 0) refuse("shape", "no less than 0");
    if (tensor_.rows > 0 && tensor_.cols > INT64_MAX / tensor_.rows)
      refuse("shape", "fewer than 2^63 elements");
    tensor_.format = static_cast<nf4_format>(narrowed("format", format, 0));
    tensor_.blocksize = narrowed("blocksize", blocksize, 1);
    tensor_.nested_blocksize = narrowed("nested_blocksize", nested_blocksize, 0);
  }

  Tensor packed_, absmax_, nested_absmax_, nested_code_, nested_offset_, codebook_;
  std::array<Value, 5> layout_;
  nf4_tensor tensor_{};
};

nf4_stream stream_beside(const dl_tensor &view) {
  void *stream = nullptr;
  require_torch(torch.cuda_stream(view.device_id, &stream), "name its stream");
  return static_cast<nf4_stream>(stream);
}

int32_t threads() {
  uint32_t count = 0;
  require_torch(torch.threads(&count), "count its threads");
  return static_cast<int32_t>(count);
}

// ---- The operators -----------------------------------------------------------------

void require_x(const dl_tensor &x, int64_t cols, nf4_matmul_args &args) {
  args.dtype = dtype_of(&x);
  args.x = x.data;
  if (args.dtype == 0) refuse("x", "float32, float16 or bfloat16");
  if (!rows_of(&x, cols, &args.m, &args.x_stride))
    refuse("x", "rows of " + std::to_string(cols) + " elements, one distance apart");
}

void require_bias(const dl_tensor &bias, const dl_tensor &x, int64_t rows, nf4_matmul_args &args) {
  args.bias = bias.data;
  if (dtype_of(&bias) != args.dtype || elements_of(&bias) != rows || !is_contiguous(&bias, rows) ||
      !together(bias, x))
    refuse("bias", std::to_string(rows) + " contiguous elements of x's dtype where x is");
}

void multiply(const nf4_tensor *weight, const nf4_matmul_args &args, const Tensor &x,
              const dl_tensor &of_x) {
  if (of_x.device_type == DL_CPU) return require(nf4.matmul_cpu(weight, &args, threads()));
  size_t needed = 0;
  require(nf4.matmul_workspace_size(weight, &args, &needed));
  Tensor workspace;  // the stream's as soon as torch has it back
  if (needed != 0) workspace = Tensor::empty({static_cast<int64_t>(needed)}, codes.uint8, x);
  require(nf4.matmul_launch(weight, &args, workspace ? workspace.data() : nullptr, needed,
                            stream_beside(of_x)));
}

// _linear(x, bias, WEIGHT) -> y
void linear(Value *stack, uint64_t arguments, uint64_t) {
  const Tensor x = taken(stack[0]), bias = taken_if_any(stack[1]);
  Weight given(stack + arguments - Weight::kArguments);
  const dl_tensor of_x = x.view("x");
  const nf4_tensor *weight = given.beside(of_x);
  nf4_matmul_args args{};
  args.struct_size = sizeof args;
  require_x(of_x, weight->cols, args);
  if (bias) require_bias(bias.view("bias"), of_x, weight->rows, args);
  std::vector<int64_t> sizes(of_x.shape, of_x.shape + of_x.ndim);
  sizes.back() = weight->rows;
  Tensor y = Tensor::empty(sizes, x.dtype(), x);
  args.y = y.data();
  args.y_stride = weight->rows;
  multiply(weight, args, x, of_x);
  stack[0] = y.release();
}

// _dense_like(like, WEIGHT) -> the weight in the dtype of `like`
void dense_like(Value *stack, uint64_t arguments, uint64_t) {
  const Tensor like = taken(stack[0]);
  Weight given(stack + arguments - Weight::kArguments);
  const dl_tensor view = like.view("like");
  const nf4_tensor *weight = given.beside(view);
  const nf4_dtype dtype = dtype_of(&view);
  if (dtype == 0) refuse("like", "float32, float16 or bfloat16");
  Tensor dense = Tensor::empty({weight->rows, weight->cols}, like.dtype(), like);
  if (view.device_type == DL_CPU)
    require(nf4.dequant_cpu(weight, dense.data(), dtype, threads()));
  else
    require(nf4.dequant_launch(weight, dense.data(), dtype, stream_beside(view)));
  stack[0] = dense.release();
}

// ---- For Python --------------------------------------------------------------------

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

bool implement(const char *key) {
  LibraryHandle library = nullptr;  // is there for as long as the process
  return torch.new_library("nf4", key, "_nf4_operators.cpp", __LINE__, &library) == 0 &&
         torch.implement(library, "_linear", linear) == 0 &&
         torch.implement(library, "_dense_like", dense_like) == 0;
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

}  // namespace

extern "C" {

PyDoc_STRVAR(functions_doc,
             "operator_functions()\n--\n\n"
             "The names of the functions that register_operators needs: libtorch's and libnf4's.");
static PyObject *functions(PyObject *, PyObject *) {
  return Py_BuildValue("NN", names(kTorch.data(), kTorch.size()), names(kNf4.data(), kNf4.size()));
}

PyDoc_STRVAR(register_doc,
             "register_operators(torch, nf4)\n--\n\n"
             "Registers kernels for operators that are defined, by the addresses of functions. The "
             "last of torch's may be 0: it has no CUDA then.");
static PyObject *register_operators(PyObject *, PyObject *arguments) {
  PyObject *of_torch, *of_nf4;
  if (!PyArg_ParseTuple(arguments, "OO", &of_torch, &of_nf4)) return nullptr;
  if (!fill(of_torch, torch) || !fill(of_nf4, nf4)) return nullptr;
  codes = {torch.uint8(),    torch.float32(), torch.float16(),
           torch.bfloat16(), torch.cpu(),     torch.cuda()};
  if (!implement("CPU") || (torch.cuda_stream != nullptr && !implement("CUDA"))) {
    PyErr_SetString(PyExc_RuntimeError, "torch does not take the operators");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef nf4_operator_methods[] = {
    {"operator_functions", functions, METH_NOARGS, functions_doc},
    {"register_operators", register_operators, METH_VARARGS, register_doc},
    {nullptr, nullptr, 0, nullptr},
};

}  // extern "C"
