// Every function of nf4.h on arguments made of the bytes of a fuzzer: sizes, the CPU, and launches,
// which may find no GPU. A shape is refused if and only if rules.hpp says so, a correct call
// succeeds, one that is refused says why and writes nothing; the sanitizers see the rest.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "driver.hpp"
#include "input.hpp"
#include "nf4/nf4.h"
#include "operands.hpp"
#include "rules.hpp"
#include "status.hpp"

namespace nf4::fuzz {
namespace {

[[noreturn]] void fail(const char *function, const char *what, nf4_status status) {
  std::fprintf(stderr, "%s: %s; it returned %s: %s\n", function, what, nf4_status_string(status),
               nf4_last_error());
  std::abort();
}

// The answer that a call must give.
enum class Expected { kRefused, kAccepted, kEither };

Expected expected(bool valid, const Memory &memory) {
  if (!valid) return Expected::kRefused;
  return memory.usual() ? Expected::kAccepted : Expected::kEither;
}

void check(const char *function, nf4_status status, Expected expected, const Memory &memory) {
  const bool refused = status == NF4_STATUS_INVALID_ARGUMENT;
  count_call(refused);
  if (status < NF4_STATUS_OK || status > NF4_STATUS_CUDA_ERROR) fail(function, "status", status);
  if (expected == Expected::kRefused && !refused)
    fail(function, "arguments that nf4.h forbids were accepted", status);
  if (expected == Expected::kAccepted && status != NF4_STATUS_OK)
    fail(function, "a correct call failed", status);
  if (status != NF4_STATUS_OK && nf4_last_error()[0] == '\0') fail(function, "no reason", status);
  if (status != NF4_STATUS_OK && !memory.untouched())
    fail(function, "it failed, but something was written", status);
  nf4::fail(NF4_STATUS_OK, "%s", "");  // so that the next reason is the next call's
}

// A function that works on the GPU, which there is none of here: it writes nothing.
void check_launch(const char *function, nf4_status status, Expected expected,
                  const Memory &memory) {
  const bool no_gpu = status == NF4_STATUS_NO_CUDA || status == NF4_STATUS_NO_DEVICE;
  if (expected == Expected::kAccepted && no_gpu) expected = Expected::kEither;
  check(function, status, expected, memory);
  if (!memory.untouched()) fail(function, "a launch wrote", status);
}

// The functions of a kind of weight; those of gradients are NULL for integers.
template <class Tensor, class Args>
struct Product {
  const char *name;
  bool gradient;
  nf4_status (*size)(const Tensor *, const Args *, size_t *);
  nf4_status (*launch)(const Tensor *, const Args *, void *, size_t, nf4_stream);
  nf4_status (*cpu)(const Tensor *, const Args *, int32_t);
};
template <class Tensor>
struct Functions {
  nf4_status (*dequant_launch)(const Tensor *, void *, nf4_dtype, nf4_stream);
  nf4_status (*dequant_cpu)(const Tensor *, void *, nf4_dtype, int32_t);
  Product<Tensor, nf4_matmul_args> products[2];
  Product<Tensor, nf4_grouped_args> grouped[2];
  nf4_status (*batch_size)(const Tensor *const *, const nf4_matmul_args *, size_t, size_t *);
  nf4_status (*batch_launch)(const Tensor *const *, const nf4_matmul_args *, size_t, void *, size_t,
                             nf4_stream);
  nf4_status (*batch_cpu)(const Tensor *const *, const nf4_matmul_args *, size_t, int32_t);
  nf4_status (*plan)(const Tensor *const *, const nf4_matmul_args *, size_t, int32_t, int32_t *,
                     const char **);
};

const Functions<nf4_tensor> kCodes = {
    nf4_dequant_launch,
    nf4_dequant_cpu,
    {{"matmul", false, nf4_matmul_workspace_size, nf4_matmul_launch, nf4_matmul_cpu},
     {"matmul_grad", true, nf4_matmul_grad_workspace_size, nf4_matmul_grad_launch,
      nf4_matmul_grad_cpu}},
    {{"matmul_grouped", false, nf4_matmul_grouped_workspace_size, nf4_matmul_grouped_launch,
      nf4_matmul_grouped_cpu},
     {"matmul_grouped_grad", true, nf4_matmul_grouped_grad_workspace_size,
      nf4_matmul_grouped_grad_launch, nf4_matmul_grouped_grad_cpu}},
    nf4_matmul_batch_workspace_size,
    nf4_matmul_batch_launch,
    nf4_matmul_batch_cpu,
    nf4_matmul_plan};
const Functions<nf4_int4_tensor> kIntegers = {
    nf4_int4_dequant_launch,
    nf4_int4_dequant_cpu,
    {{"int4_matmul", false, nf4_int4_matmul_workspace_size, nf4_int4_matmul_launch,
      nf4_int4_matmul_cpu},
     {}},
    {{"int4_matmul_grouped", false, nf4_int4_matmul_grouped_workspace_size,
      nf4_int4_matmul_grouped_launch, nf4_int4_matmul_grouped_cpu},
     {}},
    nf4_int4_matmul_batch_workspace_size,
    nf4_int4_matmul_batch_launch,
    nf4_int4_matmul_batch_cpu,
    nf4_int4_matmul_plan};
const Functions<nf4_tensor> &functions(const nf4_tensor &) { return kCodes; }
const Functions<nf4_int4_tensor> &functions(const nf4_int4_tensor &) { return kIntegers; }

nf4_status sizes_of(const nf4_tensor &w, int64_t &packed) {
  nf4_sizes sizes{};
  sizes.struct_size = sizeof sizes;
  const nf4_status status = nf4_tensor_sizes(&w, &sizes);
  packed = sizes.packed_bytes;
  if (status == NF4_STATUS_OK && sizes.blocks != blocks(w)) fail("nf4_tensor_sizes", "blocks", 0);
  return status;
}
nf4_status sizes_of(const nf4_int4_tensor &w, int64_t &packed) {
  nf4_int4_sizes sizes{};
  sizes.struct_size = sizeof sizes;
  const nf4_status status = nf4_int4_tensor_sizes(&w, &sizes);
  packed = sizes.packed_bytes;
  if (status == NF4_STATUS_OK && sizes.zeros_bytes != zeros_bytes(w))
    fail("nf4_int4_tensor_sizes", "zeros_bytes", 0);
  return status;
}

template <class Tensor>
void call_sizes(Input &in, Memory &memory) {
  Tensor w{};
  read_shape(in, w);
  int64_t packed = 0;
  const nf4_status status = sizes_of(w, packed);
  check("tensor_sizes", status, expected(valid(w), memory), memory);
  if (status == NF4_STATUS_OK && packed != packed_bytes(w)) fail("tensor_sizes", "packed", status);
}

template <class Tensor>
void call_dequant(Input &in, Memory &memory) {
  Tensor w{};
  read_shape(in, w);
  read_parts(in, memory, w, 1);
  const nf4_dtype dtype = in.number32(kDtypes[in.below(3)]);
  const int32_t threads = in.number32(1);
  const Wide item = item_bytes(dtype);
  void *const out = memory.part(elements(w) * item, static_cast<int>(item));
  const Tensor *const weight = in.rarely() ? nullptr : &w;
  memory.watch();
  const Expected shape = expected(weight != nullptr && valid(w) && valid_dtype(dtype), memory);
  check_launch("dequant_launch", functions(w).dequant_launch(weight, out, dtype, nullptr), shape,
               memory);
  if (!memory.real()) return;
  check("dequant_cpu", functions(w).dequant_cpu(weight, out, dtype, threads),
        threads < 0 ? Expected::kRefused : shape, memory);
}

void call_quantize(Input &in, Memory &memory) {
  nf4_tensor w{};
  read_shape(in, w);
  read_parts(in, memory, w, 1);
  const nf4_dtype dtype = in.number32(kDtypes[in.below(3)]);
  const int32_t threads = in.number32(1);
  const Wide item = item_bytes(dtype);
  const void *const dense = memory.part(elements(w) * item, static_cast<int>(item));
  size_t bytes = 0;
  const nf4_status size = nf4_quantize_workspace_size(&w, &bytes);
  check("nf4_quantize_workspace_size", size, expected(valid(w), memory), memory);
  void *const workspace = bytes == 0 ? nullptr : memory.part(static_cast<Wide>(bytes), 16);
  memory.watch();
  const Expected shape = expected(valid(w) && valid_dtype(dtype), memory);
  check_launch("nf4_quantize_launch",
               nf4_quantize_launch(dense, dtype, &w, workspace, bytes, nullptr), shape, memory);
  if (!memory.real()) return;
  if (bytes > 0)
    check("nf4_quantize_cpu", nf4_quantize_cpu(dense, dtype, &w, workspace, bytes - 1, 1),
          elements(w) == 0 && valid(w) ? Expected::kEither : Expected::kRefused, memory);
  check("nf4_quantize_cpu", nf4_quantize_cpu(dense, dtype, &w, workspace, bytes, threads),
        threads < 0 ? Expected::kRefused : shape, memory);
}

void call_int4_quantize(Input &in, Memory &memory) {
  nf4_int4_tensor w{};
  read_shape(in, w);
  read_parts(in, memory, w, 1);
  const nf4_dtype dtype = in.number32(kDtypes[in.below(3)]);
  const int32_t threads = in.number32(1), symmetric = in.number32(in.below(2));
  if (w.g_idx != nullptr || w.permutation != nullptr || w.zeros == nullptr) memory.set_unusual();
  const Wide item = item_bytes(dtype);
  const void *const dense = memory.part(elements(w) * item, static_cast<int>(item));
  memory.watch();
  const bool ok = valid(w) && valid_dtype(dtype) && (symmetric == 0 || symmetric == 1);
  check_launch("nf4_int4_quantize_launch",
               nf4_int4_quantize_launch(dense, dtype, &w, symmetric, nullptr), expected(ok, memory),
               memory);
  if (!memory.real()) return;
  check("nf4_int4_quantize_cpu", nf4_int4_quantize_cpu(dense, dtype, &w, symmetric, threads),
        expected(ok && threads >= 0, memory), memory);
}

void call_reorder(Input &in, Memory &memory) {
  nf4_int4_tensor from{};
  read_shape(in, from);
  read_parts(in, memory, from, 1);
  nf4_int4_tensor to = from;
  if (from.g_idx == nullptr) memory.set_unusual();
  to.g_idx = nullptr;
  to.rows = in.number(from.rows);
  to.packed = memory.part(packed_bytes(from), 4);
  auto *const permutation = memory.array<int32_t>(from.cols);
  to.permutation = permutation;
  const int32_t threads = in.number32(1);
  memory.watch();
  const bool ok = valid(from) && valid(to) && from.rows == to.rows && from.cols <= INT32_MAX;
  check_launch("nf4_int4_reorder_launch", nf4_int4_reorder_launch(&from, &to, nullptr),
               expected(ok, memory), memory);
  if (!memory.real()) return;
  check("nf4_int4_reorder_cpu", nf4_int4_reorder_cpu(&from, &to, threads),
        expected(ok && threads >= 0, memory), memory);
}

// Calls that only a GPU refuses.
bool refused_on_gpu(const nf4_tensor &, const nf4_matmul_args &args, bool gradient) {
  return args.dtype == NF4_DTYPE_FP32 && !gradient && args.m > 16;
}
bool refused_on_gpu(const nf4_int4_tensor &, const nf4_matmul_args &args, bool) {
  return args.dtype == NF4_DTYPE_FP32;
}
bool refused_on_gpu(const nf4_tensor &, const nf4_grouped_args &args, bool) {
  return args.dtype == NF4_DTYPE_FP32;
}
bool refused_on_gpu(const nf4_int4_tensor &w, const nf4_grouped_args &args, bool) {
  return args.dtype == NF4_DTYPE_FP32 || w.g_idx != nullptr || w.permutation != nullptr;
}

template <class Tensor, class Args>
void check_product(Input &in, const Product<Tensor, Args> &product, const Tensor &w,
                   const Args &values, size_t args_bytes, bool bias_refused, Memory &memory) {
  const int32_t threads = in.number32(1);
  const auto exact_values = exact(values, args_bytes);
  const Tensor *const weight = in.rarely() ? nullptr : &w;
  const Args *const args = in.rarely() ? nullptr : exact_values.get();
  const bool ok =
      weight != nullptr && args != nullptr && valid(w) && valid(w, values, product.gradient);
  size_t bytes = 0;
  check(product.name, product.size(weight, args, &bytes), expected(ok, memory), memory);
  void *const workspace = bytes == 0 ? nullptr : memory.part(static_cast<Wide>(bytes), 16);
  memory.watch();
  const Expected shape = expected(ok && !bias_refused, memory);
  check_launch(product.name, product.launch(weight, args, workspace, bytes, nullptr),
               refused_on_gpu(w, values, product.gradient) ? Expected::kRefused : shape, memory);
  if (!memory.real()) return;
  check(product.name, product.cpu(weight, args, threads), threads < 0 ? Expected::kRefused : shape,
        memory);
}

size_t bytes_of(const nf4_matmul_args &args) {
  const size_t before_lora = offsetof(nf4_matmul_args, lora);
  return args.struct_size == before_lora ? before_lora : sizeof args;
}

void add_lora(Input &in, Memory &memory, const nf4_tensor &w, nf4_matmul_args &args,
              nf4_lora &lora) {
  if (in.below(3) != 2 || args.struct_size != sizeof args) return;
  read_lora(in, memory, w, args, lora);
  args.lora = &lora;
}
void add_lora(Input &in, Memory &, const nf4_int4_tensor &, nf4_matmul_args &args, nf4_lora &lora) {
  if (in.rarely()) args.lora = &lora;
}

template <class Tensor>
void call_matmul(Input &in, Memory &memory, bool gradient) {
  Tensor w{};
  read_shape(in, w);
  read_parts(in, memory, w, 1);
  nf4_matmul_args args = read_args(in, memory, w, gradient);
  nf4_lora lora{};
  add_lora(in, memory, w, args, lora);
  check_product(in, functions(w).products[gradient], w, args, bytes_of(args),
                gradient && args.bias != nullptr, memory);
}

void call_lora_grad(Input &in, Memory &memory) {
  const nf4_lora_grad_args values = read_lora_grad(in, memory);
  const int32_t threads = in.number32(1);
  const auto exact_values = exact(values, sizeof values);
  const nf4_lora_grad_args *const args = in.rarely() ? nullptr : exact_values.get();
  memory.watch();
  const Expected shape = expected(args != nullptr && valid(values), memory);
  check_launch("nf4_lora_grad_launch", nf4_lora_grad_launch(args, nullptr), shape, memory);
  if (!memory.real()) return;
  check("nf4_lora_grad_cpu", nf4_lora_grad_cpu(args, threads),
        threads < 0 ? Expected::kRefused : shape, memory);
}

// Experts of codes are one weight, and begin with a block each.
void make_stack(Input &in, nf4_tensor &w, int32_t experts) {
  if (in.below(8) == 7 || experts < 1 || experts > 64) return;
  w.rows = w.rows % 16 * experts;
  w.cols = w.blocksize;
}
void make_stack(Input &, nf4_int4_tensor &, int32_t) {}

template <class Tensor>
void call_grouped(Input &in, Memory &memory, bool gradient) {
  Tensor w{};
  read_shape(in, w);
  const int32_t experts = in.number32(1 + in.below(5));
  make_stack(in, w, experts);
  read_parts(in, memory, w, std::is_same_v<Tensor, nf4_tensor> ? 1 : experts);
  const nf4_grouped_args args = read_grouped(in, memory, w, experts, gradient);
  check_product(in, functions(w).grouped[gradient], w, args, sizeof args, false, memory);
}

template <class Tensor>
void call_batch(Input &in, Memory &memory) {
  const auto count = static_cast<size_t>(in.number(in.below(4)));
  const size_t products = count <= NF4_MATMUL_BATCH_MAX ? count : 1;
  std::vector<Tensor> weights(products);
  std::vector<const Tensor *> list;
  std::vector<nf4_lora> loras(products);
  std::vector<nf4_matmul_args> args;
  bool ok = count <= NF4_MATMUL_BATCH_MAX, on_gpu = true;
  for (size_t i = 0; i < products; ++i) {
    Tensor &w = weights[i];
    read_shape(in, w);
    read_parts(in, memory, w, 1);
    list.push_back(in.rarely() ? nullptr : &w);
    args.push_back(read_args(in, memory, w, false));
    add_lora(in, memory, w, args[i], loras[i]);
    ok = ok && list[i] != nullptr && valid(w) && valid(w, args[i], false) &&
         args[i].struct_size == sizeof args[i];
    on_gpu = on_gpu && !refused_on_gpu(w, args[i], false);
  }
  const int32_t threads = in.number32(1);
  // Elements are as far apart as the first says.
  if (!args.empty() && args[0].struct_size != sizeof args[0]) return;
  const auto &of = functions(Tensor{});
  size_t bytes = 0;
  check("batch_workspace_size", of.batch_size(list.data(), args.data(), count, &bytes),
        expected(ok, memory), memory);
  void *const workspace = bytes == 0 ? nullptr : memory.part(static_cast<Wide>(bytes), 16);
  memory.watch();
  const Expected shape = expected(ok, memory);
  const Expected launched = on_gpu || !ok ? shape : Expected::kRefused;
  check_launch("batch_launch",
               of.batch_launch(list.data(), args.data(), count, workspace, bytes, nullptr),
               launched, memory);
  std::vector<int32_t> launches(products + 1);
  std::vector<const char *> kernels(products + 1);
  const nf4_status plan =
      of.plan(list.data(), args.data(), count, in.number32(0), launches.data(), kernels.data());
  check("plan", plan, !ok || !on_gpu ? Expected::kRefused : Expected::kEither, memory);
  if (!memory.real()) return;
  check("batch_cpu", of.batch_cpu(list.data(), args.data(), count, threads),
        threads < 0 ? Expected::kRefused : shape, memory);
}

void call_device(Input &in, Memory &memory) {
  nf4_device info{};
  info.struct_size = static_cast<size_t>(in.number(sizeof info));
  const bool ok = info.struct_size == sizeof info ||
                  info.struct_size == offsetof(nf4_device, shared_memory_bytes);
  const nf4_status status = nf4_device_info(in.number32(0), &info);
  check("nf4_device_info", status, ok ? Expected::kEither : Expected::kRefused, memory);
  if (nf4_codebook(in.number32(1)) == nullptr && in.byte() == 0) return;
  if (nf4_status_string(in.number32(0)) == nullptr) fail("nf4_status_string", "NULL", status);
}

// A text of costs in which bytes are changed, and which may end early.
void call_costs(Input &in, Memory &memory) {
  std::string text = std::string("nf4-costs 1 ") + nf4_version_string() +
                     "\ngpu 80 sm80 108 166912 13000 A100\ncodebook fp16 skinny 8 1.5 0 0 0\n"
                     "gptq bf16 dense 4096 9 0.000001 12.5 3\nend\n";
  const size_t size = text.size();
  for (int changes = in.below(4); changes > 0; --changes)
    text[static_cast<size_t>(in.number(0)) % size] = static_cast<char>(in.byte());
  if (in.rarely()) text.resize(static_cast<size_t>(in.number(0)) % (size + 1));
  // The bytes are exactly those of an allocation, so that the sanitizers see reads beyond them.
  const std::vector<char> bytes(text.begin(), text.end());
  check("nf4_set_costs", nf4_set_costs(bytes.data(), bytes.size()), Expected::kEither, memory);
  const nf4_status status = nf4_set_costs(nullptr, 0);
  if (status != NF4_STATUS_OK) fail("nf4_set_costs", "NULL was refused", status);
}

void call(Input &in, Memory &memory) {
  switch (in.below(18)) {
    case 0:
      return call_dequant<nf4_tensor>(in, memory);
    case 1:
      return call_quantize(in, memory);
    case 2:
      return call_matmul<nf4_tensor>(in, memory, false);
    case 3:
      return call_matmul<nf4_tensor>(in, memory, true);
    case 4:
      return call_batch<nf4_tensor>(in, memory);
    case 5:
      return call_grouped<nf4_tensor>(in, memory, false);
    case 6:
      return call_grouped<nf4_tensor>(in, memory, true);
    case 7:
      return call_sizes<nf4_tensor>(in, memory);
    case 8:
      return call_sizes<nf4_int4_tensor>(in, memory);
    case 9:
      return call_dequant<nf4_int4_tensor>(in, memory);
    case 10:
      return call_int4_quantize(in, memory);
    case 11:
      return call_reorder(in, memory);
    case 12:
      return call_matmul<nf4_int4_tensor>(in, memory, false);
    case 13:
      return call_batch<nf4_int4_tensor>(in, memory);
    case 14:
      return call_grouped<nf4_int4_tensor>(in, memory, false);
    case 15:
      return call_device(in, memory);
    case 17:
      return call_costs(in, memory);
    default:
      return call_lora_grad(in, memory);
  }
}

}  // namespace
}  // namespace nf4::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  nf4::fuzz::Input input(data, size);
  nf4::fuzz::Memory memory(input);
  nf4::fuzz::call(input, memory);
  return 0;
}
