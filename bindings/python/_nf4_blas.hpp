// Products of dense matrices on a GPU: in 16 bits with cuBLAS, on torch's handle for its current
// device and stream, which is torch's own addmm without its host overhead; and with torch's mm and
// addmm.
#ifndef NF4_BLAS_HPP
#define NF4_BLAS_HPP

#include <array>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include "_nf4_checks.hpp"
#include "_nf4_torch.hpp"

namespace nf4_torch {

using GuardHandle = struct OpaqueGuard *;

// Functions of torch/csrc/stable/c/shim.h, torch/csrc/inductor/aoti_torch and cublas_v2.h, whose
// enums are int here.
struct Blas {
  Error (*device)(int32_t *);
  Error (*from_blob)(void *data, int64_t dimensions, const int64_t *sizes, const int64_t *strides,
                     int64_t offset, int32_t dtype, int32_t device_type, int32_t device_index,
                     TensorHandle *);
  Error (*copy)(TensorHandle to, TensorHandle from, int32_t non_blocking);
  Error (*mm)(TensorHandle out, TensorHandle left, TensorHandle right);
  Error (*addmm)(TensorHandle out, TensorHandle bias, TensorHandle left, TensorHandle right,
                 double beta, double alpha);
  Error (*enter_device)(int32_t device_index, GuardHandle *);
  Error (*leave_device)(GuardHandle);
  Error (*handle)(void **);
  int (*set_math_mode)(void *handle, int mode);
  int (*gemm)(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha,
              const void *a, int a_type, int a_stride, const void *b, int b_type, int b_stride,
              const void *beta, void *c, int c_type, int c_stride, int compute_type, int algorithm);
};
inline Blas blas;  // zeros if torch has no CUDA

inline constexpr std::array kBlas{"aoti_torch_get_current_device_index",
                                  "aoti_torch_create_tensor_from_blob",
                                  "aoti_torch_copy_",
                                  "aoti_torch_cuda_mm_out",
                                  "aoti_torch_cuda_addmm_out",
                                  "aoti_torch_create_cuda_guard",
                                  "aoti_torch_delete_cuda_guard",
                                  "torch_get_current_cuda_blas_handle",
                                  "cublasSetMathMode",
                                  "cublasGemmEx"};
static_assert(sizeof(Blas) == kBlas.size() * sizeof(void *));

// Returns torch's number of a dtype.
inline int32_t number_of(nf4_dtype dtype) {
  return dtype == NF4_DTYPE_FP32   ? codes.float32
         : dtype == NF4_DTYPE_FP16 ? codes.float16
                                   : codes.bfloat16;
}

// Rows of a matrix on a GPU, equally spaced, in 16 bits. transposed: they are rows of the
// transpose.
struct Rows {
  const void *data;
  nf4_dtype dtype;
  int32_t device;
  int64_t rows, cols, stride;
  bool transposed = false;
};

inline bool read_rows(const dl_tensor &view, Rows &found) {
  const nf4_dtype dtype = dtype_of(&view);
  if (view.ndim < 1 || view.device_type != DL_CUDA || !has_memory(&view) ||
      (dtype != NF4_DTYPE_FP16 && dtype != NF4_DTYPE_BF16))
    return false;
  found.data = address_of(&view);
  found.dtype = dtype;
  found.device = view.device_id;
  found.cols = view.shape[view.ndim - 1];
  return rows_of(&view, found.cols, &found.rows, &found.stride) && fits(found.rows, 1) &&
         fits(found.cols, 1) && fits(found.stride, 1);
}

// Tells whether the matrix is on torch's current device, and cuBLAS is available.
inline bool can_multiply(const Rows &left) {
  int32_t device = -1;
  return blas.gemm != nullptr && blas.device(&device) == 0 && device == left.device;
}

// out = scale left right + kept out, contiguous, all of one dtype; summed in binary32. `right` may
// be transposed.
inline void multiply(const Rows &left, const Rows &right, float scale, float kept, void *out) {
  constexpr int kNoTranspose = 0, kTranspose = 1, kCompute32F = 68, kDefault = -1;
  constexpr int kDefaultMath = 0, kNoReducedPrecisionReduction = 16;
  void *handle = nullptr;
  require_torch(blas.handle(&handle), "find its cuBLAS handle");
  const int type = left.dtype == NF4_DTYPE_FP16 ? 2 : 14;  // cudaDataType
  const int64_t columns = right.transposed ? right.rows : right.cols;
  const int rows = static_cast<int>(left.rows), cols = static_cast<int>(columns);
  // cuBLAS is column-major, so it computes out^T = right^T left^T.
  int failed = blas.set_math_mode(handle, kNoReducedPrecisionReduction);
  if (failed == 0)
    failed =
        blas.gemm(handle, right.transposed ? kTranspose : kNoTranspose, kNoTranspose, cols, rows,
                  static_cast<int>(left.cols), &scale, right.data, type,
                  static_cast<int>(right.stride), left.data, type, static_cast<int>(left.stride),
                  &kept, out, type, cols, kCompute32F, kDefault);
  blas.set_math_mode(handle, kDefaultMath);  // restores torch's setting
  if (failed != 0) throw std::runtime_error("nf4: cuBLAS failed");
}

// Borrowed memory as a tensor of one or two dimensions.
inline Tensor borrowed(const void *data, std::initializer_list<int64_t> sizes,
                       std::initializer_list<int64_t> strides, int32_t dtype, int32_t device) {
  TensorHandle handle = nullptr;
  require_torch(
      blas.from_blob(const_cast<void *>(data), static_cast<int64_t>(sizes.size()), sizes.begin(),
                     strides.begin(), 0, dtype, codes.cuda, device, &handle),
      "take a matrix");
  return Tensor(handle);
}

// Makes a device torch's current one.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t device) {
    require_torch(blas.enter_device(device, &guard_), "enter a device");
  }
  ~CurrentDevice() { blas.leave_device(guard_); }
  CurrentDevice(const CurrentDevice &) = delete;
  CurrentDevice &operator=(const CurrentDevice &) = delete;

 private:
  GuardHandle guard_ = nullptr;
};

// A new matrix on a GPU, in 16 bits, and its memory.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, nf4_dtype dtype, int32_t device)
      : tensor_(Tensor::empty({rows, cols}, number_of(dtype), codes.cuda, device)),
        rows_{tensor_.data(), dtype, device, rows, cols, cols} {}

  // Copies a float32 matrix, rounded.
  void round(const void *from, int64_t stride) {
    const Tensor source =
        borrowed(from, {rows_.rows, rows_.cols}, {stride, 1}, codes.float32, rows_.device);
    require_torch(blas.copy(tensor_.handle(), source.handle(), 1), "cast a matrix");
  }

  const Rows &rows() const { return rows_; }
  void *data() const { return tensor_.data(); }

 private:
  Tensor tensor_;
  Rows rows_;
};

}  // namespace nf4_torch

#endif
