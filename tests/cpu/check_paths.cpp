// Checks which way a product is expected to take less time: arguments, and the CPU's answers. A
// GPU's are in tests/standin_cuda/check_paths.cpp.
#include <cstddef>
#include <cstdint>
#include <string>

#include "nf4/nf4.h"
#include "support/catch.hpp"

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

}  // namespace

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
  nf4_int4_tensor integers{};
  integers.struct_size = sizeof integers;
  integers.layout = NF4_INT4_GPTQ;
  integers.scales_dtype = NF4_DTYPE_FP16;
  integers.group_size = 32;
  integers.rows = 96;
  integers.cols = 128;
  Product product(NF4_DTYPE_BF16, 4096);
  CHECK(nf4_int4_matmul_path(&integers, &product.args, NF4_DEVICE_CPU, &product.path) ==
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
  CHECK(nf4_int4_matmul_grouped_path(&integers, &grouped, NF4_DEVICE_CPU, &product.path) ==
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
