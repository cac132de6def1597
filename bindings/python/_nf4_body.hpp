// The work of both entries of the operators after their checks: calls of libnf4, whose functions
// nf4.torch finds by name.
#ifndef NF4_BODY_HPP
#define NF4_BODY_HPP

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "_nf4_blas.hpp"
#include "_nf4_checks.hpp"
#include "_nf4_paths.hpp"
#include "_nf4_torch.hpp"
#include "nf4/nf4.h"

namespace nf4_torch {

// ---- libnf4 --------------------------------------------------------------------

template <class Weight>
struct Functions {
  nf4_status (*dequant_launch)(const Weight *, void *, nf4_dtype, nf4_stream);
  nf4_status (*dequant_cpu)(const Weight *, void *, nf4_dtype, int32_t);
  nf4_status (*matmul_launch)(const Weight *, const nf4_matmul_args *, void *, size_t, nf4_stream);
  nf4_status (*matmul_cpu)(const Weight *, const nf4_matmul_args *, int32_t);
  nf4_status (*matmul_workspace_size)(const Weight *, const nf4_matmul_args *, size_t *);
  nf4_status (*batch_launch)(const Weight *const *, const nf4_matmul_args *, size_t, void *, size_t,
                             nf4_stream);
  nf4_status (*batch_cpu)(const Weight *const *, const nf4_matmul_args *, size_t, int32_t);
  nf4_status (*batch_workspace_size)(const Weight *const *, const nf4_matmul_args *, size_t,
                                     size_t *);
  nf4_status (*matmul_path)(const Weight *, const nf4_matmul_args *, int32_t, nf4_path *);
};

struct Nf4 {
  Functions<nf4_tensor> codebook;
  Functions<nf4_int4_tensor> int4;
  decltype(&nf4_matmul_grad_launch) grad_launch;
  decltype(&nf4_matmul_grad_cpu) grad_cpu;
  decltype(&nf4_matmul_grad_workspace_size) grad_workspace_size;
  decltype(&nf4_lora_grad_launch) lora_grad_launch;
  decltype(&nf4_matmul_grouped_launch) grouped_launch;
  decltype(&nf4_matmul_grouped_cpu) grouped_cpu;
  decltype(&nf4_matmul_grouped_workspace_size) grouped_workspace_size;
  decltype(&nf4_matmul_grouped_path) grouped_path;
  decltype(&nf4_last_error) last_error;
};
inline Nf4 nf4;

inline constexpr std::array kNf4{"nf4_dequant_launch",
                                 "nf4_dequant_cpu",
                                 "nf4_matmul_launch",
                                 "nf4_matmul_cpu",
                                 "nf4_matmul_workspace_size",
                                 "nf4_matmul_batch_launch",
                                 "nf4_matmul_batch_cpu",
                                 "nf4_matmul_batch_workspace_size",
                                 "nf4_matmul_path",
                                 "nf4_int4_dequant_launch",
                                 "nf4_int4_dequant_cpu",
                                 "nf4_int4_matmul_launch",
                                 "nf4_int4_matmul_cpu",
                                 "nf4_int4_matmul_workspace_size",
                                 "nf4_int4_matmul_batch_launch",
                                 "nf4_int4_matmul_batch_cpu",
                                 "nf4_int4_matmul_batch_workspace_size",
                                 "nf4_int4_matmul_path",
                                 "nf4_matmul_grad_launch",
                                 "nf4_matmul_grad_cpu",
                                 "nf4_matmul_grad_workspace_size",
                                 "nf4_lora_grad_launch",
                                 "nf4_matmul_grouped_launch",
                                 "nf4_matmul_grouped_cpu",
                                 "nf4_matmul_grouped_workspace_size",
                                 "nf4_matmul_grouped_path",
                                 "nf4_last_error"};
static_assert(sizeof(Nf4) == kNf4.size() * sizeof(void *));

inline const Functions<nf4_tensor> &functions_for(const nf4_tensor &) { return nf4.codebook; }
inline const Functions<nf4_int4_tensor> &functions_for(const nf4_int4_tensor &) { return nf4.int4; }

inline void require(nf4_status status) {
  if (status == NF4_STATUS_OK) return;
  const std::string why = std::string("libnf4: ") + nf4.last_error();
  if (status == NF4_STATUS_INVALID_ARGUMENT) throw std::invalid_argument(why);
  throw std::runtime_error(why);
}

// ---- The body, after its checks -------------------------------------------------------

inline nf4_stream stream_of(const dl_tensor &view) {
  void *stream = nullptr;
  require_torch(torch.cuda_stream(view.device_id, &stream), "name its stream");
  return static_cast<nf4_stream>(stream);
}

inline int32_t threads() {
  uint32_t count = 0;
  require_torch(torch.threads(&count), "count its threads");
  return static_cast<int32_t>(count);
}

// Calls launch(workspace, stream) with a workspace of `bytes` bytes on the device of x.
template <class Launch>
void in_workspace(size_t bytes, const dl_tensor &x, const Launch &launch) {
  Tensor workspace;  // once it is released, torch reuses it in the order of the stream
  if (bytes != 0)
    workspace = Tensor::empty({static_cast<int64_t>(bytes)}, codes.uint8, codes.cuda, x.device_id);
  require(launch(workspace ? workspace.data() : nullptr, stream_of(x)));
}

// The most weights that share x in a call.
inline constexpr size_t kMostSiblings = 3;

template <class Weight>
void dequantize_to(void *out, const dl_tensor &like, const Weight &weight) {
  const nf4_dtype dtype = dtype_of(&like);
  const auto &of_kind = functions_for(weight);
  if (like.device_type == DL_CPU)
    return require(of_kind.dequant_cpu(&weight, out, dtype, threads()));
  require(of_kind.dequant_launch(&weight, out, dtype, stream_of(like)));
}

// On a CPU the fused way is always faster for y, though not for a gradient.
template <class Kind>
bool prefers_dense(const Product<Kind> &product, const dl_tensor &x) {
  if (x.device_type == DL_CPU) return false;
  thread_local KeptPaths kept;
  return NF4_PATH_DENSE == kept.find(key_of(product, x.device_id), [&] {
    nf4_path path = 0;
    const auto ask = functions_for(product.weight).matmul_path;
    return ask(&product.weight, &product.args, x.device_id, &path) == NF4_STATUS_OK ? path : 0;
  });
}

template <class Kind>
void multiply_fused(const Product<Kind> *products, size_t count, const dl_tensor &x) {
  const typename Kind::Descriptor *weights[kMostSiblings];
  nf4_matmul_args args[kMostSiblings];
  for (size_t i = 0; i < count; ++i) {
    weights[i] = &products[i].weight;
    args[i] = products[i].args;
  }
  const auto &of_kind = functions_for(*weights[0]);
  const bool one = count == 1;
  if (x.device_type == DL_CPU)
    return require(one ? of_kind.matmul_cpu(weights[0], args, threads())
                       : of_kind.batch_cpu(weights, args, count, threads()));
  size_t needed = 0;
  require(one ? of_kind.matmul_workspace_size(weights[0], args, &needed)
              : of_kind.batch_workspace_size(weights, args, count, &needed));
  in_workspace(needed, x, [&](void *space, nf4_stream stream) {
    return one ? of_kind.matmul_launch(weights[0], args, space, needed, stream)
               : of_kind.batch_launch(weights, args, count, space, needed, stream);
  });
}

// Reads the rows of x in 16 bits, if cuBLAS takes x.
inline bool read_left(const nf4_matmul_args &args, const dl_tensor &x, int64_t cols, Rows &left) {
  left = {args.x, args.dtype, x.device_id, args.m, cols, args.x_stride};
  return args.dtype != NF4_DTYPE_FP32 && fits(args.m, 1) && fits(cols, 1) && fits(args.x_stride, 1);
}

// Multiplies by a dense weight on a GPU. torch owns the dense weight until the stream has used it.
template <class Kind>
void multiply_dense(const Product<Kind> &product, const dl_tensor &x) {
  const nf4_matmul_args &args = product.args;
  const int64_t m = args.m, rows = product.weight.rows, cols = product.weight.cols;
  const int32_t device = x.device_id, dtype = number_of(args.dtype);
  const CurrentDevice current(device);
  const Tensor dense = Tensor::empty({rows, cols}, dtype, codes.cuda, device);
  dequantize_to(dense.data(), x, product.weight);
  Rows left{};
  if (args.bias == nullptr && args.y_stride == rows && fits(rows, 1) &&
      read_left(args, x, cols, left))
    return multiply(left, {dense.data(), args.dtype, device, rows, cols, cols, true}, 1, 0, args.y);
  const Tensor transposed = borrowed(dense.data(), {cols, rows}, {1, cols}, dtype, device);
  const Tensor factor = borrowed(args.x, {m, cols}, {args.x_stride, 1}, dtype, device);
  const Tensor y = borrowed(args.y, {m, rows}, {args.y_stride, 1}, dtype, device);
  if (args.bias == nullptr)
    return require_torch(blas.mm(y.handle(), factor.handle(), transposed.handle()), "multiply");
  const Tensor bias = borrowed(args.bias, {rows}, {1}, dtype, device);
  require_torch(
      blas.addmm(y.handle(), bias.handle(), factor.handle(), transposed.handle(), 1.0, 1.0),
      "multiply and add");
}

// Computes products of one x, each in the way that is expected to take less time (_nf4_paths.hpp).
template <class Kind>
void multiply(const Product<Kind> *products, size_t count, const dl_tensor &x) {
  const auto is_dense = [&](const Product<Kind> &each) { return prefers_dense(each, x); };
  if (std::none_of(products, products + count, is_dense)) return multiply_fused(products, count, x);
  for (size_t i = 0; i < count; ++i)
    is_dense(products[i]) ? multiply_dense(products[i], x) : multiply_fused(products + i, 1, x);
}

// dX = dY W; args.x is dY.
inline void multiply_gradient(const Product<Codebook> &product, const dl_tensor &grad_y) {
  const nf4_tensor *const weight = &product.weight;
  const nf4_matmul_args *const args = &product.args;
  if (grad_y.device_type == DL_CPU) return require(nf4.grad_cpu(weight, args, threads()));
  size_t needed = 0;
  require(nf4.grad_workspace_size(weight, args, &needed));
  in_workspace(needed, grad_y, [&](void *space, nf4_stream stream) {
    return nf4.grad_launch(weight, args, space, needed, stream);
  });
}

// Computes dA and dB on a GPU.
inline void launch_lora_grad(const nf4_lora_grad_args &args, const dl_tensor &grad_y) {
  require(nf4.lora_grad_launch(&args, stream_of(grad_y)));
}

// Registers kernels for the operators that are defined, with torch's key for a device
// (_nf4_dispatcher.cpp). Returns false if torch refuses.
bool implement(const char *key);

}  // namespace nf4_torch

#endif
