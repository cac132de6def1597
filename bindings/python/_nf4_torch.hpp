// torch's tensors in C++ without torch's headers: uses C functions of libtorch whose names and
// meaning are stable (from 2.10 on), which nf4.torch finds by name.
#ifndef NF4_TORCH_HPP
#define NF4_TORCH_HPP

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "_nf4_dlpack.h"

namespace nf4_torch {

using TensorHandle = struct OpaqueTensor *;
using LibraryHandle = struct OpaqueLibrary *;
using Error = int32_t;  // 0: no error

// An argument or a result, StableIValue in torch/csrc/inductor/aoti_torch/c/shim.h: an integer, or
// a TensorHandle, which the receiver owns. An optional value is 0, or points to such a Value that
// was made with `new`.
using Value = uint64_t;
using Operator = void (*)(Value *stack, uint64_t arguments, uint64_t results);

// Functions of that header and of torch/csrc/stable/c/shim.h.
struct Torch {
  Error (*delete_tensor)(TensorHandle);
  Error (*data)(TensorHandle, void **);
  Error (*dimensions)(TensorHandle, int64_t *);
  Error (*sizes)(TensorHandle, int64_t **);
  Error (*strides)(TensorHandle, int64_t **);
  Error (*dtype)(TensorHandle, int32_t *);
  Error (*device_type)(TensorHandle, int32_t *);
  Error (*device_index)(TensorHandle, int32_t *);
  Error (*empty_strided)(int64_t dimensions, const int64_t *sizes, const int64_t *strides,
                         int32_t dtype, int32_t device_type, int32_t device_index, TensorHandle *);
  Error (*threads)(uint32_t *);
  int32_t (*uint8)(), (*int32)(), (*float32)(), (*float16)(), (*bfloat16)(), (*cpu)(), (*cuda)();
  Error (*new_library)(const char *name, const char *key, const char *file, uint32_t line,
                       LibraryHandle *);
  Error (*implement)(LibraryHandle, const char *name, Operator);
  Error (*cuda_stream)(int32_t device_index, void **);  // NULL if torch has no CUDA
};
inline Torch torch;

inline constexpr std::array kTorch{"aoti_torch_delete_tensor_object",
                                   "aoti_torch_get_data_ptr",
                                   "aoti_torch_get_dim",
                                   "aoti_torch_get_sizes",
                                   "aoti_torch_get_strides",
                                   "aoti_torch_get_dtype",
                                   "aoti_torch_get_device_type",
                                   "aoti_torch_get_device_index",
                                   "aoti_torch_empty_strided",
                                   "torch_get_num_threads",
                                   "aoti_torch_dtype_uint8",
                                   "aoti_torch_dtype_int32",
                                   "aoti_torch_dtype_float32",
                                   "aoti_torch_dtype_float16",
                                   "aoti_torch_dtype_bfloat16",
                                   "aoti_torch_device_type_cpu",
                                   "aoti_torch_device_type_cuda",
                                   "aoti_torch_library_init_impl",
                                   "aoti_torch_library_impl",
                                   "aoti_torch_get_current_cuda_stream"};
static_assert(sizeof(Torch) == kTorch.size() * sizeof(void *));

// torch's numbers for these.
struct Codes {
  int32_t uint8, int32, float32, float16, bfloat16, cpu, cuda;
};
inline Codes codes;

// torch has written the reason to stderr.
inline void require_torch(Error error, const char *what) {
  if (error != 0) throw std::runtime_error(std::string("nf4: torch failed to ") + what);
}

// Dtypes other than these have no lanes.
inline void set_dtype(dl_tensor &view, int32_t dtype) {
  const struct {
    int32_t number;
    uint8_t code, bits;
  } known[] = {{codes.uint8, DL_UINT, 8},
               {codes.int32, DL_INT, 32},
               {codes.float32, DL_FLOAT, 32},
               {codes.float16, DL_FLOAT, 16},
               {codes.bfloat16, DL_BFLOAT, 16}};
  for (const auto &each : known)
    if (each.number == dtype) {
      view.code = each.code;
      view.bits = each.bits;
      view.lanes = 1;
    }
}

// Owns a handle, or none.
class Tensor {
 public:
  explicit Tensor(TensorHandle handle = nullptr) : handle_(handle) {}

  // torch's numbers for the dtype and the type of device.
  static Tensor empty(const std::vector<int64_t> &sizes, int32_t dtype, int32_t device_type,
                      int32_t device_index) {
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      strides[i] = stride;
      const int64_t size = std::max<int64_t>(sizes[i], 1);
      if (stride > INT64_MAX / size)
        throw std::runtime_error("no memory for 2^63 elements or more");
      stride *= size;
    }
    TensorHandle made = nullptr;
    if (torch.empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                            device_type, device_index, &made) != 0)
      throw std::runtime_error(
          std::string(device_type == codes.cuda ? "CUDA out of memory" : "no memory") + " for " +
          std::to_string(stride) + " elements");
    return Tensor(made);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  TensorHandle handle() const { return handle_.get(); }
  Value release() { return reinterpret_cast<Value>(handle_.release()); }

  void *data() const { return get<void *>(torch.data); }
  int32_t dtype() const { return get<int32_t>(torch.dtype); }
  int32_t device_type() const { return get<int32_t>(torch.device_type); }
  int32_t device_index() const { return get<int32_t>(torch.device_index); }

  dl_tensor view() const {
    dl_tensor view{};
    view.data = data();
    view.device_type = device_type() == codes.cuda ? DL_CUDA : DL_CPU;
    if (view.device_type == DL_CUDA) view.device_id = device_index();
    view.ndim = static_cast<int32_t>(get<int64_t>(torch.dimensions));
    set_dtype(view, dtype());
    view.shape = get<int64_t *>(torch.sizes);
    view.strides = get<int64_t *>(torch.strides);
    return view;
  }

 private:
  template <class T>
  T get(Error (*function)(TensorHandle, T *)) const {
    T found{};
    require_torch(function(handle_.get(), &found), "look at a tensor");
    return found;
  }

  struct Delete {
    void operator()(TensorHandle handle) const { torch.delete_tensor(handle); }
  };
  std::unique_ptr<OpaqueTensor, Delete> handle_;
};

inline Tensor taken(Value value) { return Tensor(reinterpret_cast<TensorHandle>(value)); }

inline Tensor taken_if_any(Value value) {
  if (value == 0) return Tensor();
  const std::unique_ptr<Value> inner(reinterpret_cast<Value *>(value));
  return taken(*inner);
}

}  // namespace nf4_torch

#endif
