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

const std::vector<BadArgument> kBadArguments = {
    {"no arguments",
     Who::kMatmul,
     false,
     [](Call &c) { c.matmul = nullptr; },
     {"nf4_matmul_args", "NULL"}},
    {"args' struct_size 0",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.struct_size = 0; },
     {"nf4_matmul_args.struct_size", "0"}},
    {"args' struct_size of a later version",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.struct_size += 8; },
     {"nf4_matmul_args.struct_size", std::to_string(sizeof(nf4_matmul_args) + 8)}},
    {"no such dtype", Who::kMatmul, false, [](Call &c) { c.args.dtype = 4; }, {"dtype", "4"}},
    {"fp32 of 17 rows on a GPU",
     Who::kMatmulLaunch,
     false,
     [](Call &c) {
       c.args.dtype = NF4_DTYPE_FP32;
       c.args.m = 17;
     },
     {"dtype", "1", "m is 17", "at most 16"}},
    {"args' reserved 1",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.reserved = 1; },
     {"nf4_matmul_args.reserved", "1"}},
    {"m -1", Who::kMatmul, false, [](Call &c) { c.args.m = -1; }, {"m", "-1"}},
    {"m -2^63",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.m = INT64_MIN; },
     {"m", "-9223372036854775808"}},
    {"x_stride too small",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.x_stride = kCols - 1; },
     {"x_stride", "96", "97"}},
    {"negative x_stride",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.x_stride = -kCols; },
     {"x_stride", "-97"}},
    {"y_stride too small",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.y_stride = kRows - 1; },
     {"y_stride", "2", "3"}},
    {"m * x_stride beyond 2^60",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.x_stride = (int64_t{1} << 59) + 1; },
     {"m * x_stride", "576460752303423489"}},
    {"m * y_stride beyond 2^60",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.y_stride = INT64_MAX; },
     {"m * y_stride", "9223372036854775807"}},
    {"m * x_stride beyond int64",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.m = INT64_MAX; },
     {"m * x_stride", "9223372036854775807"}},
    {"no x", Who::kMatmul, false, [](Call &c) { c.args.x = nullptr; }, {"x", "NULL"}},
    {"no y", Who::kMatmul, false, [](Call &c) { c.args.y = nullptr; }, {"y", "NULL"}},
    {"misaligned x",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.x = moved(c.args.x, 1); },
     {"x", "multiple of 2"}},
    {"misaligned y",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.y = moved(c.args.y, 1); },
     {"y", "multiple of 2"}},
    {"misaligned bias",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.bias = moved(c.args.bias, 1); },
     {"bias", "multiple of 2"}},
    {"y overlaps x",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.x = c.args.y; },
     {"overlaps", "x", "y"}},
    {"y overlaps the end of x",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.y = moved(c.x_buffer.data(), kColumns * kCols * 2 - 2); },
     {"overlaps", "x", "y"}},
    {"y overlaps bias",
     Who::kMatmul,
     false,
     [](Call &c) { c.args.bias = moved(c.args.y, 2); },
     {"overlaps", "bias", "y"}},
    {"y overlaps packed",
     Who::kMatmul,
     false,
     [](Call &c) { c.tensor.packed = moved(c.args.y, kColumns * kRows * 2 - 1); },
     {"overlaps", "packed", "y"}},
    {"y overlaps absmax",
     Who::kMatmul,
     false,
     [](Call &c) { c.tensor.absmax = c.args.y; },
     {"overlaps", "absmax", "y"}},
    {"the gap between rows of y overlaps bias",
     Who::kMatmul,
     false,
     [](Call &c) {
       c.args.y_stride = 8;
       c.args.bias = moved(c.args.y, 3 * 2);
     },
     {"overlaps", "bias", "y"}},
    {"y overlaps codebook",
     Who::kMatmul,
     false,
     [](Call &c) { c.tensor.codebook = static_cast<float *>(c.args.y); },
     {"overlaps", "codebook", "y"}},
    {"y overlaps nested_code",
     Who::kMatmul,
     true,
     [](Call &c) { c.tensor.nested_code = static_cast<float *>(c.args.y); },
     {"overlaps", "nested_code", "y"}},
};

}  // namespace

TEST_CASE("a bad argument of matmul is named, and nothing is written", "[api]") {
  check_bad_arguments(kBadArguments);
}

TEST_CASE("the workspace of matmul needs no pointer but the structs' own", "[api]") {
  Call call(true);
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
  call.args.x_stride = kCols - 1;
  CHECK(nf4_matmul_workspace_size(call.weight, call.matmul, &bytes) == NF4_STATUS_INVALID_ARGUMENT);
}

TEST_CASE("many rows of x need workspace, and few do not", "[api]") {
  Call call(true);
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
  CHECK(bytes(1 << 20, 4096, 64, NF4_DTYPE_BF16) < 22'500'000);
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
  Call call(true);
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
  Call call(false);
  call.args.bias = call.args.x;
  CHECK(nf4_matmul_cpu(call.weight, call.matmul, 1) == NF4_STATUS_OK);
}
