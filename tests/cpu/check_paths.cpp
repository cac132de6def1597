// Checks which way a product is expected to take less time: arguments, and the CPU's answers. A
// GPU's are in tests/standin_cuda/check_paths.cpp.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/catch.hpp"
#include "validate.hpp"

namespace {

struct Product {
  nf4_tensor weight{};
  nf4_matmul_args args{};
  nf4_path path = 7;

  explicit Product(nf4_dtype dtype, int64_t m = 4) {
    weight.struct_size = sizeof weight;
    weight.format = NF4_FORMAT_NF4;
    weight.blocksize = 64;
    weight.rows = 96;
    weight.cols = 128;
    args.struct_size = sizeof args;
    args.dtype = dtype;
    args.m = m;
    args.x_stride = args.y_stride = 128;
  }
  nf4_status ask(int32_t device) { return nf4_matmul_path(&weight, &args, device, &path); }
  nf4_status ask_gradient(int32_t device) {
    return nf4_matmul_grad_path(&weight, &args, device, &path);
  }
};

bool says(const char *detail) { return nf4_last_error() == std::string(detail); }

// Different addresses, far apart, that are aligned for any type of a part but for no vector.
class Addresses {
 public:
  template <class T = void>
  T *next() {
    return reinterpret_cast<T *>(last_ += uintptr_t{1} << 24);
  }

 private:
  uintptr_t last_ = 4;
};

using Pointers = std::vector<const void *>;

Pointers pointers_of(const nf4::Weight &of) {
  return {of.packed, of.absmax, of.nested_absmax, of.nested_code, of.nested_offset, of.codebook};
}
Pointers pointers_of(const nf4::Int4Weight &of) {
  return {of.packed, of.scales, of.zeros, of.g_idx, of.permutation};
}
Pointers pointers_of(const nf4::Lora &of) { return {of.a, of.b, of.product}; }
template <class W>
Pointers pointers_of(const nf4::MatmulProblemOf<W> &of) {
  Pointers found = pointers_of(of.weight);
  found.insert(found.end(), {of.x, of.bias, of.y});
  for (const void *each : pointers_of(of.lora)) found.push_back(each);
  return found;
}
template <class W>
Pointers pointers_of(const nf4::GroupedProblemOf<W> &of) {
  Pointers found = pointers_of(of.weight);
  found.insert(found.end(), {of.x, of.bias, of.y, of.ends, of.x_index, of.row_scale});
  return found;
}

nf4_tensor nested_weight(Addresses &addresses) {
  nf4_tensor weight = Product(NF4_DTYPE_BF16).weight;
  weight.nested_blocksize = 256;
  weight.packed = addresses.next();
  weight.absmax = addresses.next();
  weight.nested_absmax = addresses.next<float>();
  weight.nested_code = addresses.next<float>();
  weight.nested_offset = addresses.next<float>();
  weight.codebook = addresses.next<float>();
  return weight;
}

nf4_int4_tensor integers() {
  nf4_int4_tensor weight{};
  weight.struct_size = sizeof weight;
  weight.layout = NF4_INT4_GPTQ;
  weight.scales_dtype = NF4_DTYPE_FP16;
  weight.group_size = 32;
  weight.rows = 96;
  weight.cols = 128;
  return weight;
}

nf4_int4_tensor integers(Addresses &addresses) {
  nf4_int4_tensor weight = integers();
  weight.packed = addresses.next();
  weight.scales = addresses.next();
  weight.zeros = addresses.next();
  weight.g_idx = addresses.next<int32_t>();
  weight.permutation = addresses.next<int32_t>();
  return weight;
}

template <class W, class Tensor>
void check_product(const Tensor &weight, nf4_matmul_args args, Addresses &addresses) {
  args.x = addresses.next();
  args.bias = addresses.next();
  args.y = addresses.next();
  const Tensor *const weights[] = {&weight};
  nf4::MatmulProblemOf<W> launched, asked;
  nf4::MatmulBatchOf<W> planned;
  REQUIRE(validate_matmul_shape(&weight, &args, launched) == NF4_STATUS_OK);
  REQUIRE(validate_matmul_operands(&weight, &args, nullptr, 0, launched) == NF4_STATUS_OK);
  REQUIRE(validate_matmul_plan(&weight, &args, asked) == NF4_STATUS_OK);
  REQUIRE(validate_matmul_batch_plan(weights, &args, 1, planned) == NF4_STATUS_OK);
  CHECK(pointers_of(asked) == pointers_of(launched));
  CHECK(pointers_of(planned.list[0]) == pointers_of(launched));
  CHECK(asked.workspace == nullptr);
}

template <class W, class Tensor>
void check_experts(const Tensor &weight, nf4_grouped_args args, Addresses &addresses) {
  args.x = addresses.next();
  args.bias = addresses.next();
  args.y = addresses.next();
  args.ends = addresses.next<int32_t>();
  args.x_index = addresses.next<int32_t>();
  args.row_scale = addresses.next<float>();
  nf4::GroupedProblemOf<W> launched{}, asked{};
  REQUIRE(validate_grouped_shape(&weight, &args, launched) == NF4_STATUS_OK);
  REQUIRE(validate_grouped_operands(&weight, &args, nullptr, 0, launched) == NF4_STATUS_OK);
  REQUIRE(validate_grouped_plan(&weight, &args, asked) == NF4_STATUS_OK);
  CHECK(pointers_of(asked) == pointers_of(launched));
}

}  // namespace

TEST_CASE("a path and a plan see the addresses that a launch sees", "[api]") {
  Addresses addresses;
  const nf4_tensor weight = nested_weight(addresses);
  const nf4_int4_tensor integer_weight = integers(addresses);
  nf4_lora lora{};
  lora.struct_size = sizeof lora;
  lora.dtype = NF4_DTYPE_BF16;
  lora.rank = 8;
  lora.a = addresses.next();
  lora.a_stride = 128;
  lora.b = addresses.next();
  lora.b_stride = 8;
  lora.product = addresses.next();
  nf4_matmul_args args = Product(NF4_DTYPE_BF16).args;
  check_product<nf4::Int4Weight>(integer_weight, args, addresses);
  check_product<nf4::Weight>(weight, args, addresses);
  args.lora = &lora;
  check_product<nf4::Weight>(weight, args, addresses);
  nf4_grouped_args experts{};
  experts.struct_size = sizeof experts;
  experts.dtype = NF4_DTYPE_BF16;
  experts.experts = 3;
  experts.m = experts.x_rows = 4;
  experts.x_stride = experts.y_stride = experts.bias_stride = 128;
  check_experts<nf4::Weight>(weight, experts, addresses);
  check_experts<nf4::Int4Weight>(integer_weight, experts, addresses);
}

TEST_CASE("a path on the CPU", "[api]") {
  for (const nf4_dtype dtype : {NF4_DTYPE_FP32, NF4_DTYPE_FP16, NF4_DTYPE_BF16})
    for (const int64_t m : {0, 1, 17, 257, 4096}) {
      Product product(dtype, m);
      INFO("dtype " << dtype << ", m " << m);
      CHECK(product.ask(NF4_DEVICE_CPU) == NF4_STATUS_OK);
      CHECK(product.path == NF4_PATH_FUSED);
      CHECK(product.ask_gradient(NF4_DEVICE_CPU) == NF4_STATUS_OK);
      // With 17 to 256 rows it depends on the processor.
      if (dtype != NF4_DTYPE_BF16 || m < 17) CHECK(product.path == NF4_PATH_FUSED);
      if (dtype == NF4_DTYPE_BF16 && m > 256) CHECK(product.path == NF4_PATH_DENSE);
    }
  const nf4_int4_tensor integer_weight = integers();
  Product product(NF4_DTYPE_BF16, 4096);
  CHECK(nf4_int4_matmul_path(&integer_weight, &product.args, NF4_DEVICE_CPU, &product.path) ==
        NF4_STATUS_OK);
  CHECK(product.path == NF4_PATH_FUSED);
  nf4_grouped_args grouped{};
  grouped.struct_size = sizeof grouped;
  grouped.dtype = NF4_DTYPE_FP32;
  grouped.experts = 3;
  grouped.m = grouped.x_rows = 4096;
  grouped.x_stride = grouped.y_stride = 128;
  for (const auto &ask : {nf4_matmul_grouped_path, nf4_matmul_grouped_grad_path}) {
    product.path = 7;
    CHECK(ask(&product.weight, &grouped, NF4_DEVICE_CPU, &product.path) == NF4_STATUS_OK);
    CHECK(product.path == NF4_PATH_FUSED);
  }
  CHECK(nf4_int4_matmul_grouped_path(&integer_weight, &grouped, NF4_DEVICE_CPU, &product.path) ==
        NF4_STATUS_OK);
  CHECK(product.path == NF4_PATH_FUSED);
}

TEST_CASE("a path of wrong arguments", "[api]") {
  Product product(NF4_DTYPE_BF16);
  CHECK(product.ask(-2) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(says("device is -2; expected a GPU's index, or NF4_DEVICE_CPU (-1)"));
  CHECK(nf4_matmul_path(&product.weight, &product.args, NF4_DEVICE_CPU, nullptr) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(says("path is NULL"));
  CHECK(nf4_matmul_path(nullptr, &product.args, NF4_DEVICE_CPU, &product.path) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(says("the nf4_tensor is NULL"));
  product.args.m = -1;
  CHECK(product.ask(NF4_DEVICE_CPU) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(says("m is -1; expected 0 or more"));
  product.args.m = 4;
  CHECK(nf4_lora_grad_path(nullptr, NF4_DEVICE_CPU, &product.path) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(says("the nf4_lora_grad_args is NULL"));
  CHECK(product.path == 7);
  // A GPU answers, or says why there is none, also for a product that is empty or that it refuses.
  nf4_device info{};
  info.struct_size = sizeof info;
  const nf4_status usable = nf4_device_info(0, &info);
  for (const int64_t m : {0, 4}) {
    product.args.m = m;
    CHECK(product.ask(0) == usable);
    CHECK(product.ask_gradient(0) == usable);
  }
  product.args.dtype = NF4_DTYPE_FP32;
  product.args.m = 17;
  CHECK(product.ask(0) == usable);
  if (usable == NF4_STATUS_OK) {
    CHECK(product.path == NF4_PATH_DENSE);
    CHECK(product.ask(info.device_count) == NF4_STATUS_INVALID_ARGUMENT);
  } else {
    CHECK(product.path == 7);
  }
}

TEST_CASE("device info for a caller that knows fewer fields", "[api]") {
  constexpr size_t kBefore = offsetof(nf4_device, shared_memory_bytes);
  nf4_device info{};
  info.struct_size = kBefore;
  info.shared_memory_bytes = info.timed = 7;
  const nf4_status status = nf4_device_info(0, &info);
  CHECK(status != NF4_STATUS_INVALID_ARGUMENT);
  CHECK(info.struct_size == kBefore);
  CHECK(info.shared_memory_bytes == 7);
  CHECK(info.timed == 7);
  info.struct_size = kBefore + 4;
  CHECK(nf4_device_info(0, &info) == NF4_STATUS_INVALID_ARGUMENT);
}
