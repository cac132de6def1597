// Arguments that only the matmul functions have; the others are in check_api.cpp.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/call.hpp"
#include "support/catch.hpp"

using namespace nf4::test;

namespace {

std::string is_short(const std::string &stride, int64_t least) {
  return stride + " is " + std::to_string(least - 1) + "; expected at least " +
         std::to_string(least);
}

// The arguments of a product with a weight of any kind.
template <class Call>
std::vector<Fault<Call>> common_faults() {
  constexpr int64_t kRows = Call::kRows, kCols = Call::kCols;
  const std::string cols = std::to_string(kCols);
  return {
      {kMultiply, [](Call &c) { c.matmul = nullptr; }, "the nf4_matmul_args is NULL"},
      {kMultiply, [](Call &c) { c.args.struct_size = 0; }, "nf4_matmul_args.struct_size is 0"},
      {kMultiply, [](Call &c) { c.args.struct_size += 8; },
       "nf4_matmul_args.struct_size is " + std::to_string(sizeof(nf4_matmul_args) + 8)},
      {kMultiply, [](Call &c) { c.args.dtype = 4; }, "dtype is 4"},
      {kMultiply, [](Call &c) { c.args.reserved = 1; }, "nf4_matmul_args.reserved is 1"},
      {kMultiply, [](Call &c) { c.args.m = -1; }, "m is -1"},
      {kMultiply, [](Call &c) { c.args.m = INT64_MIN; }, "m is -9223372036854775808"},
      {kMultiply, [](Call &c) { c.args.x_stride = kCols - 1; }, is_short("x_stride", kCols)},
      {kMultiply, [](Call &c) { c.args.x_stride = -kCols; }, "x_stride is -" + cols},
      {kMultiply, [](Call &c) { c.args.y_stride = kRows - 1; }, is_short("y_stride", kRows)},
      {kMultiply, [](Call &c) { c.args.x_stride = (int64_t{1} << 59) + 1; },
       "m * x_stride is 2 * 576460752303423489"},
      {kMultiply, [](Call &c) { c.args.y_stride = INT64_MAX; },
       "m * y_stride is 2 * 9223372036854775807"},
      {kMultiply, [](Call &c) { c.args.m = INT64_MAX; },
       "m * x_stride is 9223372036854775807 * " + cols},
      {kMultiply, [](Call &c) { c.args.x = nullptr; }, "x is NULL"},
      {kMultiply, [](Call &c) { c.args.y = nullptr; }, "y is NULL"},
      {kMultiply, [](Call &c) { c.args.x = moved(c.args.x, 1); },
       "x is 0x; expected a multiple of 2"},
      {kMultiply, [](Call &c) { c.args.y = moved(c.args.y, 1); },
       "y is 0x; expected a multiple of 2"},
      {kMultiply, [](Call &c) { c.args.bias = moved(c.args.bias, 1); },
       "bias is 0x; expected a multiple of 2"},
      {kMultiply, [](Call &c) { c.args.x = c.args.y; }, "x overlaps y"},
      {kMultiply, [](Call &c) { c.args.y = moved(c.x_buffer.data(), Call::kM * kCols * 2 - 2); },
       "x overlaps y"},
      {kMultiply, [](Call &c) { c.args.bias = moved(c.args.y, 2); }, "bias overlaps y"},
      {kMultiply, [](Call &c) { c.tensor.packed = moved(c.args.y, Call::kM * kRows * 2 - 4); },
       "packed overlaps y"},
      // The gap between two rows of y.
      {kMultiply,
       [](Call &c) {
         c.args.y_stride = kRows + 5;
         c.args.bias = moved(c.args.y, kRows * 2);
       },
       "bias overlaps y"},
  };
}

const std::vector<Fault<Call>> kFaults = {
    {kMultiply | kLaunch,
     [](Call &c) {
       c.args.dtype = NF4_DTYPE_FP32;
       c.args.m = 17;
     },
     "dtype is 1 (fp32) and m is 17; expected m of at most 16, or dtype 2 (fp16) or 3 (bf16), on a "
     "GPU"},
    {kMultiply, [](Call &c) { c.tensor.absmax = c.args.y; }, "absmax overlaps y"},
    {kMultiply, [](Call &c) { c.tensor.codebook = static_cast<float *>(c.args.y); },
     "codebook overlaps y"},
    {kMultiply | kNested, [](Call &c) { c.tensor.nested_code = static_cast<float *>(c.args.y); },
     "nested_code overlaps y"},
    // The last byte of y.
    {kMultiply, [](Call &c) { c.tensor.packed = moved(c.args.y, Call::kM * Call::kRows * 2 - 1); },
     "packed overlaps y"},
};

}  // namespace

TEMPLATE_TEST_CASE("a bad argument of matmul is named, and nothing is written", "[api]", Call,
                   Int4Call) {
  check_faults(common_faults<TestType>());
}

TEST_CASE("a bad argument of matmul with a codebook weight is named, and nothing is written",
          "[api]") {
  check_faults(kFaults);
}

TEST_CASE("the workspace of matmul needs no pointer but the structs' own", "[api]") {
  Call call(kNested);
  call.tensor.packed = nullptr;
  call.tensor.absmax = nullptr;
  call.args.x = nullptr;
  call.args.y = nullptr;
  size_t bytes = SIZE_MAX;
  CHECK(nf4_matmul_workspace_size(call.weight, call.matmul, &bytes) == NF4_STATUS_OK);
  CHECK(bytes != SIZE_MAX);
  CHECK(nf4_matmul_workspace_size(call.weight, call.matmul, nullptr) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(std::string(nf4_last_error()).find("bytes is NULL") != std::string::npos);
  CHECK(nf4_matmul_workspace_size(nullptr, call.matmul, &bytes) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_matmul_workspace_size(call.weight, nullptr, &bytes) == NF4_STATUS_INVALID_ARGUMENT);
  call.args.x_stride = Call::kCols - 1;
  CHECK(nf4_matmul_workspace_size(call.weight, call.matmul, &bytes) == NF4_STATUS_INVALID_ARGUMENT);
}

TEST_CASE("many rows of x need workspace, and few do not", "[api]") {
  Call call(kNested);
  call.tensor.rows = call.args.y_stride = 4096;
  call.tensor.cols = call.args.x_stride = 4096;
  const auto bytes = [&](int64_t m, int64_t cols, int64_t blocksize, nf4_dtype dtype) {
    call.args.m = m;
    call.args.dtype = dtype;
    call.tensor.blocksize = blocksize;
    call.tensor.cols = call.args.x_stride = cols;
    size_t found = SIZE_MAX;
    REQUIRE(nf4_matmul_workspace_size(call.weight, call.matmul, &found) == NF4_STATUS_OK);
    return found;
  };
  CHECK(bytes(8, 4096, 64, NF4_DTYPE_BF16) == 0);
  CHECK(bytes(8, 4096, 64, NF4_DTYPE_FP16) == 0);
  CHECK(bytes(9, 4096, 64, NF4_DTYPE_BF16) > 0);
  CHECK(bytes(9, 4096, 64, NF4_DTYPE_FP16) > 0);
  CHECK(bytes(1 << 20, 4096, 64, NF4_DTYPE_BF16) > 0);
  CHECK(bytes(1 << 20, 4096, 64, NF4_DTYPE_BF16) < 25'200'000);
  // Their product is more than 64 bits have.
  call.tensor.rows = call.args.y_stride = int64_t{1} << 29;
  CHECK(bytes(int64_t{1} << 29, int64_t{1} << 29, 64, NF4_DTYPE_BF16) ==
        bytes(1 << 20, 4096, 64, NF4_DTYPE_BF16));
  for (const int64_t m : {9, 65}) {
    CHECK(bytes(m, 4096, 64, NF4_DTYPE_FP32) == 0);
    CHECK(bytes(m, 4096 - 32, 64, NF4_DTYPE_BF16) == 0);
    CHECK(bytes(m, 4096, 32, NF4_DTYPE_BF16) == 0);
  }
}

TEST_CASE("more rows of x never need less workspace", "[api]") {
  Call call(kNested);
  for (const nf4_dtype dtype : {NF4_DTYPE_FP16, NF4_DTYPE_BF16})
    for (const int64_t rows : {1, 97, 4096, 14336})
      for (const int64_t cols : {0, 64, 97, 4096, 14336}) {
        call.tensor.rows = call.args.y_stride = rows;
        call.tensor.cols = call.args.x_stride = cols;
        call.args.dtype = dtype;
        size_t before = 0;
        for (call.args.m = 0; call.args.m < 5000; call.args.m += 1 + call.args.m / 40) {
          size_t bytes = SIZE_MAX;
          REQUIRE(nf4_matmul_workspace_size(call.weight, call.matmul, &bytes) == NF4_STATUS_OK);
          CHECK(bytes >= before);
          before = bytes;
        }
      }
}

// A product that needs workspace: all that it takes is in one allocation, one part after the other.
TEST_CASE("a bad workspace of matmul is named, and nothing is written", "[api]") {
  constexpr int64_t kSide = 512, kMany = 65;
  constexpr size_t kPart = kSide * kSide, kWorkspaceAt = 4 * kPart;
  std::vector<uint8_t> memory(kWorkspaceAt + (1 << 20), 0xa5);
  nf4_tensor tensor{};
  tensor.struct_size = sizeof tensor;
  tensor.format = NF4_FORMAT_NF4;
  tensor.blocksize = 64;
  tensor.rows = tensor.cols = kSide;
  tensor.packed = memory.data();
  tensor.absmax = memory.data() + kPart;
  nf4_matmul_args args{};
  args.struct_size = sizeof args;
  args.dtype = NF4_DTYPE_BF16;
  args.m = kMany;
  args.x = memory.data() + 2 * kPart;
  args.y = memory.data() + 3 * kPart;
  args.x_stride = args.y_stride = kSide;
  size_t needed = 0;
  REQUIRE(nf4_matmul_workspace_size(&tensor, &args, &needed) == NF4_STATUS_OK);
  REQUIRE(needed > 0);
  REQUIRE(needed <= 1 << 20);
  uint8_t *const right = memory.data() + kWorkspaceAt;
  const struct {
    void *workspace;
    size_t bytes;
    std::vector<std::string> named;
  } bad[] = {
      {nullptr, needed, {"workspace", "NULL"}},
      {right, 0, {"workspace_bytes is 0", std::to_string(needed)}},
      {right, needed - 1, {"workspace_bytes is", std::to_string(needed - 1)}},
      {right + 8, needed, {"workspace", "16"}},
      {memory.data(), needed, {"overlaps", "workspace", "packed"}},
      {memory.data() + kPart, needed, {"overlaps", "workspace", "absmax"}},
      {memory.data() + 2 * kPart, needed, {"x overlaps workspace"}},
      {memory.data() + 3 * kPart, needed, {"workspace overlaps y"}},
  };
  const nf4_tensor *const weights[] = {&tensor};
  for (const auto &each : bad) {
    const auto check = [&](nf4_status status) {
      CHECK(status == NF4_STATUS_INVALID_ARGUMENT);
      const std::string error = nf4_last_error();
      INFO("nf4_last_error(): " << error);
      for (const std::string &word : each.named) CHECK(error.find(word) != std::string::npos);
    };
    check(nf4_matmul_launch(&tensor, &args, each.workspace, each.bytes, nullptr));
    check(nf4_matmul_batch_launch(weights, &args, 1, each.workspace, each.bytes, nullptr));
  }
  CHECK(std::all_of(memory.begin(), memory.end(), [](uint8_t byte) { return byte == 0xa5; }));
}

TEST_CASE("inputs of matmul may share memory", "[api]") {
  Call call(kFlat);
  call.args.bias = call.args.x;
  CHECK(nf4_matmul_cpu(call.weight, call.matmul, 1) == NF4_STATUS_OK);
}
