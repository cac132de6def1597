// Arguments that only the matmul functions of integer weights have, and what needs no pointers.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "nf4/nf4.h"
#include "support/call.hpp"
#include "support/catch.hpp"
#include "support/int4_call.hpp"

using namespace nf4::test;

namespace {

const std::vector<Int4Fault> kMultiplying = {
    {"no arguments",
     kMultiply,
     kGptq,
     [](Int4Call &c) { c.matmul = nullptr; },
     {"nf4_matmul_args", "NULL"}},
    {"args' struct_size 0",
     kMultiply,
     kAwq,
     [](Int4Call &c) { c.args.struct_size = 0; },
     {"nf4_matmul_args.struct_size is 0"}},
    {"no such dtype", kMultiply, kGptq, [](Int4Call &c) { c.args.dtype = 4; }, {"dtype is 4"}},
    {"fp32 on a GPU",
     kMultiply | kLaunch,
     kGptq,
     [](Int4Call &c) { c.args.dtype = NF4_DTYPE_FP32; },
     {"dtype is 1"}},
    {"args' reserved 1",
     kMultiply,
     kCompressed,
     [](Int4Call &c) { c.args.reserved = 1; },
     {"reserved is 1"}},
    {"m -1", kMultiply, kGptq, [](Int4Call &c) { c.args.m = -1; }, {"m is -1"}},
    {"x_stride too small",
     kMultiply,
     kGptq,
     [](Int4Call &c) { c.args.x_stride = kInt4K - 1; },
     {"x_stride is 63", "64"}},
    {"y_stride too small",
     kMultiply,
     kGptq,
     [](Int4Call &c) { c.args.y_stride = kInt4N - 1; },
     {"y_stride is 15", "16"}},
    {"m * y_stride beyond 2^60",
     kMultiply,
     kGptq,
     [](Int4Call &c) { c.args.y_stride = INT64_MAX; },
     {"m * y_stride"}},
    {"no x", kMultiply, kGptq, [](Int4Call &c) { c.args.x = nullptr; }, {"x is NULL"}},
    {"no y", kMultiply, kGptq, [](Int4Call &c) { c.args.y = nullptr; }, {"y is NULL"}},
    {"misaligned y",
     kMultiply,
     kGptq,
     [](Int4Call &c) { c.args.y = moved(c.args.y, 1); },
     {"y", "multiple of 2"}},
    {"y overlaps x", kMultiply, kGptq, [](Int4Call &c) { c.args.x = c.args.y; }, {"x overlaps y"}},
    {"y overlaps packed",
     kMultiply,
     kGptq,
     [](Int4Call &c) { c.tensor.packed = c.args.y; },
     {"packed overlaps y"}},
    {"y overlaps scales",
     kMultiply,
     kAwq,
     [](Int4Call &c) { c.tensor.scales = c.args.y; },
     {"scales overlaps y"}},
    {"y overlaps zeros",
     kMultiply,
     kCompressed,
     [](Int4Call &c) { c.tensor.zeros = c.args.y; },
     {"zeros overlaps y"}},
    {"y overlaps g_idx",
     kMultiply,
     kGptq,
     [](Int4Call &c) { c.tensor.g_idx = static_cast<int32_t *>(c.args.y); },
     {"g_idx overlaps y"}},
    {"y overlaps permutation",
     kMultiply,
     kGptq,
     [](Int4Call &c) { c.tensor.permutation = static_cast<int32_t *>(c.args.y); },
     {"permutation overlaps y"}},
};

}  // namespace

TEST_CASE("a bad argument of a matmul of integer weights is named, and nothing is written",
          "[api]") {
  check_faults(kMultiplying);
}

TEST_CASE("arrays of integer weights that are missing are named", "[api]") {
  const Int4Call call(kGptq);
  CHECK(nf4_int4_matmul_batch_cpu(nullptr, &call.args, 1, 1) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_last_error() == std::string("the array of nf4_int4_tensor is NULL"));
  CHECK(nf4_int4_matmul_batch_launch(&call.weight, nullptr, 1, nullptr, 0, nullptr) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_last_error() == std::string("the array of nf4_matmul_args is NULL"));
}

TEST_CASE("a batch of integer weights counts its products", "[api]") {
  const Int4Call first(kGptq);
  Int4Call second(kAwq);
  const nf4_int4_tensor *const weights[] = {&first.tensor, &second.tensor};
  const auto refused = [&](const char *detail) {
    const nf4_matmul_args args[] = {first.args, second.args};
    const nf4_status status = nf4_int4_matmul_batch_cpu(weights, args, 2, 1);
    CHECK(status == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(nf4_last_error() == std::string(detail));
    CHECK(first.untouched());
    CHECK(second.untouched());
  };
  second.tensor.rows = 4;
  refused("product 1: rows is 4; expected a multiple of 8 in the AWQ layout");
  second.tensor.rows = kInt4N;
  second.args.y = first.args.y;
  refused("y of product 0 overlaps y of product 1");
  second.args.y = first.zeros.data();
  refused("y of product 1 overlaps zeros of product 0");
}

TEST_CASE("an integer weight without elements needs no pointers", "[api]") {
  for (const nf4_int4_layout layout : {kGptq, kAwq, kCompressed})
    for (const auto &[rows, cols] : {std::pair<int64_t, int64_t>{0, 0}, {0, 64}, {8, 0}}) {
      Int4Call call(layout);
      for (nf4_int4_tensor *tensor : {&call.tensor, &call.to}) {
        tensor->rows = rows;
        tensor->cols = cols;
        tensor->packed = tensor->scales = tensor->zeros = nullptr;
        tensor->permutation = nullptr;
      }
      call.out = nullptr;
      call.args.m = 0;
      for (const Int4Function &function : int4_functions()) {
        INFO(function.name << ", layout " << layout << ", " << rows << " x " << cols);
        CHECK(function.call(call) == NF4_STATUS_OK);
        CHECK(call.untouched());
      }
    }
}

TEST_CASE("sizes, workspace and plan of an integer weight need no pointer but the structs' own",
          "[api]") {
  Int4Call call(kGptq);
  call.tensor.packed = call.tensor.scales = call.tensor.zeros = nullptr;
  call.args.x = nullptr;
  call.args.y = nullptr;
  const std::string bytes_is_null = "bytes is NULL";
  size_t bytes = SIZE_MAX;
  CHECK(nf4_int4_matmul_workspace_size(call.weight, call.matmul, &bytes) == NF4_STATUS_OK);
  CHECK(bytes != SIZE_MAX);
  CHECK(nf4_int4_matmul_batch_workspace_size(&call.weight, call.matmul, 1, &bytes) ==
        NF4_STATUS_OK);
  CHECK(nf4_int4_matmul_workspace_size(call.weight, call.matmul, nullptr) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_last_error() == bytes_is_null);
  CHECK(nf4_int4_matmul_batch_workspace_size(&call.weight, call.matmul, 1, nullptr) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_last_error() == bytes_is_null);
  int32_t launch = 7;
  const char *kernel = nullptr;
  CHECK(nf4_int4_matmul_plan(&call.weight, call.matmul, 1, 0, nullptr, &kernel) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_last_error() == std::string("launches is NULL"));
  CHECK(nf4_int4_matmul_plan(&call.weight, call.matmul, 1, 0, &launch, nullptr) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_last_error() == std::string("kernels is NULL"));
  call.tensor.group_size = 48;
  nf4_int4_sizes sizes{};
  sizes.struct_size = sizeof sizes;
  CHECK(nf4_int4_tensor_sizes(call.weight, &sizes) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_int4_matmul_workspace_size(call.weight, call.matmul, &bytes) ==
        NF4_STATUS_INVALID_ARGUMENT);
}

TEST_CASE("the sizes of integer weights", "[api]") {
  const struct {
    nf4_int4_layout layout;
    int64_t rows, cols;
    int32_t group_size;
    int64_t groups, packed, scales, zeros;
  } cases[] = {
      {kGptq, 4096, 11008, 128, 86, 4096 * 11008 / 2, 4096 * 86 * 2, 4096 * 86 / 2},
      {kGptq, 13, 64, -1, 1, 13 * 32, 26, 8},
      {kAwq, 4096, 4096, 64, 64, 4096 * 2048, 4096 * 128, 4096 * 32},
      {kAwq, 8, 5, -1, 1, 20, 16, 4},
      {kCompressed, 3, 17, -1, 1, 3 * 12, 6, 4},
      {kCompressed, 9, 64, 32, 2, 9 * 32, 36, 16},
      {kCompressed, 0, 64, 32, 2, 0, 0, 0},
      {kAwq, 8, 0, 128, 0, 0, 0, 0},
      {kGptq, int64_t{1} << 40, 1 << 20, -1, 1, int64_t{1} << 59, int64_t{1} << 41,
       int64_t{1} << 39},
  };
  for (const auto &each : cases) {
    INFO("layout " << each.layout << ", " << each.rows << " x " << each.cols);
    nf4_int4_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    tensor.layout = each.layout;
    tensor.scales_dtype = NF4_DTYPE_BF16;
    tensor.group_size = each.group_size;
    tensor.rows = each.rows;
    tensor.cols = each.cols;
    nf4_int4_sizes sizes{};
    sizes.struct_size = sizeof sizes;
    REQUIRE(nf4_int4_tensor_sizes(&tensor, &sizes) == NF4_STATUS_OK);
    CHECK(sizes.groups == each.groups);
    CHECK(sizes.packed_bytes == each.packed);
    CHECK(sizes.scales_bytes == each.scales);
    CHECK(sizes.zeros_bytes == each.zeros);
    CHECK(nf4_int4_tensor_sizes(&tensor, nullptr) == NF4_STATUS_INVALID_ARGUMENT);
    sizes.struct_size -= 8;
    CHECK(nf4_int4_tensor_sizes(&tensor, &sizes) == NF4_STATUS_INVALID_ARGUMENT);
  }
}
