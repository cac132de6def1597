// Arguments that only the functions of integer weights have: each wrong one gives a status and a
// detail that names it, and no byte is written.
#include <climits>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "nf4/nf4.h"
#include "support/call.hpp"
#include "support/catch.hpp"

using namespace nf4::test;

namespace {

const std::string kDiffers =
    "`to` differs from `from` in another field than packed, g_idx and permutation";

// A field or a pointer of the weight, which every function looks at.
const std::vector<Fault<Int4Call>> kWeight = {
    {kAll, [](Int4Call &c) { c.tensor.layout = 0; }, "layout is 0"},
    {kAll, [](Int4Call &c) { c.tensor.layout = 4; }, "layout is 4"},
    {kAll, [](Int4Call &c) { c.tensor.layout = -1; }, "layout is -1"},
    {kCompressed, [](Int4Call &c) { c.tensor.scales_dtype = 1; }, "scales_dtype is 1"},
    {kAll, [](Int4Call &c) { c.tensor.scales_dtype = 0; }, "scales_dtype is 0"},
    {kAwq, [](Int4Call &c) { c.tensor.scales_dtype = 4; }, "scales_dtype is 4"},
    {kAll, [](Int4Call &c) { c.tensor.group_size = 0; }, "group_size is 0"},
    {kAwq, [](Int4Call &c) { c.tensor.group_size = -2; }, "group_size is -2"},
    {kCompressed, [](Int4Call &c) { c.tensor.group_size = INT_MIN; }, "group_size is -2147483648"},
    {kCompressed, [](Int4Call &c) { c.tensor.group_size = 4; }, "group_size is 4"},
    {kAll, [](Int4Call &c) { c.tensor.group_size = 20; }, "group_size is 20"},
    {kAll, [](Int4Call &c) { c.tensor.group_size = 48; },
     "group_size is 48; expected a divisor of cols, 64, or -1"},
    {kCompressed, [](Int4Call &c) { c.tensor.group_size = 128; },
     "group_size is 128; expected a divisor of cols, 64, or -1"},
    {kAll, [](Int4Call &c) { c.tensor.zero_offset = 2; }, "zero_offset is 2"},
    {kAll, [](Int4Call &c) { c.tensor.zero_offset = -1; }, "zero_offset is -1"},
    {kAwq, [](Int4Call &c) { c.tensor.zero_offset = 1; }, "zero_offset is 1"},
    {kCompressed, [](Int4Call &c) { c.tensor.zero_offset = 1; }, "zero_offset is 1"},
    {kGptq,
     [](Int4Call &c) {
       c.tensor.zero_offset = 1;
       c.tensor.zeros = nullptr;
     },
     "zero_offset is 1, but zeros is NULL"},
    {kGptq,
     [](Int4Call &c) {
       c.tensor.cols = 60;
       c.tensor.group_size = -1;
     },
     "cols is 60; expected a multiple of 8 in the GPTQ layout"},
    {kAwq, [](Int4Call &c) { c.tensor.rows = 12; },
     "rows is 12; expected a multiple of 8 in the AWQ layout"},
    {kAwq, [](Int4Call &c) { c.tensor.scales = nullptr; }, "scales is NULL"},
    {kAll, [](Int4Call &c) { c.tensor.packed = moved(c.tensor.packed, 2); },
     "packed is 0x; expected a multiple of 4"},
    {kCompressed, [](Int4Call &c) { c.tensor.scales = moved(c.tensor.scales, 1); },
     "scales is 0x; expected a multiple of 2"},
    {kAll, [](Int4Call &c) { c.tensor.zeros = moved(c.tensor.zeros, 2); },
     "zeros is 0x; expected a multiple of 4"},
    {kDequant | kMultiply, [](Int4Call &c) { c.tensor.g_idx = moved(integers(c.g_idx), 2); },
     "g_idx is 0x; expected a multiple of 4"},
    {kDequant | kMultiply | kAwq,
     [](Int4Call &c) { c.tensor.permutation = moved(integers(c.permutation), 1); },
     "permutation is 0x; expected a multiple of 4"},
};

const std::vector<Fault<Int4Call>> kOperands = {
    {kDequant | kAwq, [](Int4Call &c) { c.tensor.scales = c.dense; }, "scales overlaps out"},
    {kDequant | kCompressed, [](Int4Call &c) { c.tensor.zeros = c.dense; }, "zeros overlaps out"},
    {kDequant, [](Int4Call &c) { c.tensor.g_idx = static_cast<int32_t *>(c.dense); },
     "g_idx overlaps out"},
    {kDequant, [](Int4Call &c) { c.tensor.permutation = static_cast<int32_t *>(c.dense); },
     "permutation overlaps out"},
    {kQuantize, [](Int4Call &c) { c.symmetric = 2; }, "symmetric is 2"},
    {kQuantize | kCompressed, [](Int4Call &c) { c.symmetric = -1; }, "symmetric is -1"},
    {kQuantize | kCompressed, [](Int4Call &c) { c.tensor.zeros = nullptr; },
     "zeros is NULL, but symmetric is 0"},
    {kQuantize, [](Int4Call &c) { c.tensor.g_idx = integers(c.g_idx); }, "g_idx is not NULL"},
    {kQuantize | kAwq, [](Int4Call &c) { c.tensor.permutation = integers(c.permutation); },
     "permutation is not NULL"},
    {kQuantize | kCompressed, [](Int4Call &c) { c.tensor.scales = c.dense; }, "in overlaps scales"},
    {kQuantize,
     [](Int4Call &c) { c.tensor.scales = moved(c.tensor.packed, Int4Call::kPackedBytes - 2); },
     "packed overlaps scales"},
    {kQuantize | kAwq,
     [](Int4Call &c) { c.tensor.zeros = moved(c.tensor.scales, Int4Call::kScaleBytes - 4); },
     "scales overlaps zeros"},
    {kMultiply | kLaunch, [](Int4Call &c) { c.args.dtype = NF4_DTYPE_FP32; }, "dtype is 1 (fp32)"},
    {kMultiply | kAwq, [](Int4Call &c) { c.tensor.scales = c.args.y; }, "scales overlaps y"},
    {kMultiply | kCompressed, [](Int4Call &c) { c.tensor.zeros = c.args.y; }, "zeros overlaps y"},
    {kMultiply, [](Int4Call &c) { c.tensor.g_idx = static_cast<int32_t *>(c.args.y); },
     "g_idx overlaps y"},
    {kMultiply, [](Int4Call &c) { c.tensor.permutation = static_cast<int32_t *>(c.args.y); },
     "permutation overlaps y"},
};

const std::vector<Fault<Int4Call>> kReordering = {
    {kReorder, [](Int4Call &c) { c.target = nullptr; }, "the nf4_int4_tensor is NULL"},
    {kReorder, [](Int4Call &c) { c.with_g_idx = false; },
     "expected `from` with g_idx and without permutation"},
    {kReorder | kAwq, [](Int4Call &c) { c.tensor.permutation = integers(c.permutation); },
     "expected `from` with g_idx and without permutation"},
    {kReorder | kCompressed, [](Int4Call &c) { c.to.g_idx = integers(c.g_idx); },
     "g_idx of `to` is not NULL"},
    {kReorder, [](Int4Call &c) { c.to.permutation = nullptr; }, "permutation of `to` is NULL"},
    {kReorder, [](Int4Call &c) { c.to.packed = nullptr; }, "packed of `to` is NULL"},
    {kReorder, [](Int4Call &c) { c.to.struct_size -= 8; }, "nf4_int4_tensor.struct_size is 72"},
    {kReorder | kGptq, [](Int4Call &c) { c.to.layout = NF4_INT4_AWQ; }, kDiffers},
    {kReorder, [](Int4Call &c) { c.to.group_size = -1; }, kDiffers},
    {kReorder | kAwq, [](Int4Call &c) { c.to.rows = 8; }, kDiffers},
    {kReorder | kCompressed, [](Int4Call &c) { c.to.cols = 32; }, kDiffers},
    {kReorder, [](Int4Call &c) { c.to.scales_dtype = NF4_DTYPE_BF16; }, kDiffers},
    {kReorder | kGptq, [](Int4Call &c) { c.to.zero_offset = 1; }, kDiffers},
    {kReorder, [](Int4Call &c) { c.to.zeros = nullptr; }, kDiffers},
    {kReorder, [](Int4Call &c) { c.to.permutation = moved(c.to.permutation, 2); },
     "permutation of `to` is 0x; expected a multiple of 4"},
    {kReorder | kAwq, [](Int4Call &c) { c.to.packed = moved(c.to.packed, 1); },
     "packed of `to` is 0x; expected a multiple of 4"},
    {kReorder, [](Int4Call &c) { c.to.packed = c.tensor.packed; },
     "packed overlaps packed of `to`"},
    {kReorder, [](Int4Call &c) { c.to.permutation = integers(c.g_idx); },
     "g_idx overlaps permutation of `to`"},
    {kReorder, [](Int4Call &c) { c.to.packed = c.tensor.scales; },
     "scales overlaps packed of `to`"},
};

}  // namespace

TEST_CASE("a bad argument of an integer weight is named, and nothing is written", "[api]") {
  check_faults(kWeight);
  check_faults(kOperands);
  check_faults(kReordering);
}

TEST_CASE("a column out of range is named on the CPU, and nothing is written", "[api]") {
  struct Index {
    const char *name;
    int32_t value, end;
  };
  for (const Index &index : {Index{"g_idx", Int4Call::kGroups, Int4Call::kGroups},
                             {"g_idx", -1, Int4Call::kGroups},
                             {"g_idx", INT_MAX, Int4Call::kGroups},
                             {"g_idx", INT_MIN, Int4Call::kGroups},
                             {"permutation", Int4Call::kCols, Int4Call::kCols},
                             {"permutation", -1, Int4Call::kCols}})
    for (const Function<Int4Call> &function : Int4Call::functions()) {
      const bool of_groups = index.name == std::string("g_idx");
      const int takes_it = kDequant | kMultiply | (of_groups ? kReorder : 0);
      if (function.launches() || (function.who & takes_it) == 0) continue;
      INFO(function.name << ", " << index.name << " " << index.value);
      for (const int64_t at : {int64_t{0}, Int4Call::kCols - 1}) {
        Int4Call call(kGptq);
        const GuardedBuffer &buffer = of_groups ? call.g_idx : call.permutation;
        int32_t *const values = integers(buffer);
        std::memset(values, 0, buffer.size());
        values[at] = index.value;
        (of_groups ? call.tensor.g_idx : call.tensor.permutation) = values;
        CHECK(function.call(call) == NF4_STATUS_INVALID_ARGUMENT);
        const std::string found = "[" + std::to_string(at) + "] is " + std::to_string(index.value);
        const std::string expected = index.name + found + "; expected 0 to ";
        const std::string error = nf4_last_error();  // a batch counts its products before it
        CHECK(error.find(expected + std::to_string(index.end - 1)) != error.npos);
        std::memset(values, 0xa5, buffer.size());
        CHECK(call.y_buffer.untouched());
        CHECK(call.dense_buffer.untouched());
        CHECK(call.reordered.untouched());
      }
    }
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
  second.tensor.rows = Int4Call::kRows;
  second.args.y = first.args.y;
  refused("y of product 0 overlaps y of product 1");
  second.args.y = first.zeros.data();
  refused("y of product 1 overlaps zeros of product 0");
}

TEST_CASE("an integer weight without elements needs no pointers", "[api]") {
  for (const int layout : Int4Call::kForms)
    for (const auto &[rows, cols] : {std::pair<int64_t, int64_t>{0, 0}, {0, 64}, {8, 0}}) {
      Int4Call call(layout);
      for (nf4_int4_tensor *tensor : {&call.tensor, &call.to}) {
        tensor->rows = rows;
        tensor->cols = cols;
        tensor->packed = tensor->scales = tensor->zeros = nullptr;
        tensor->permutation = nullptr;
      }
      call.dense = nullptr;
      call.args.m = 0;
      for (const Function<Int4Call> &function : Int4Call::functions()) {
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
      {NF4_INT4_GPTQ, 4096, 11008, 128, 86, 4096 * 11008 / 2, 4096 * 86 * 2, 4096 * 86 / 2},
      {NF4_INT4_GPTQ, 13, 64, -1, 1, 13 * 32, 26, 8},
      {NF4_INT4_AWQ, 4096, 4096, 64, 64, 4096 * 2048, 4096 * 128, 4096 * 32},
      {NF4_INT4_AWQ, 8, 5, -1, 1, 20, 16, 4},
      {NF4_INT4_COMPRESSED_TENSORS, 3, 17, -1, 1, 3 * 12, 6, 4},
      {NF4_INT4_COMPRESSED_TENSORS, 9, 64, 32, 2, 9 * 32, 36, 16},
      {NF4_INT4_COMPRESSED_TENSORS, 0, 64, 32, 2, 0, 0, 0},
      {NF4_INT4_AWQ, 8, 0, 128, 0, 0, 0, 0},
      {NF4_INT4_GPTQ, int64_t{1} << 40, 1 << 20, -1, 1, int64_t{1} << 59, int64_t{1} << 41,
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
