// The arguments of products of experts.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/catch.hpp"
#include "support/guarded.hpp"

using namespace nf4::test;

namespace {

constexpr int32_t kExperts = 3;
constexpr int64_t kN = 4, kK = 96, kM = 5, kTokens = 2;

// A right product, to be made wrong.
struct Call {
  GuardedBuffer packed{kExperts * kN * kK / 2, Edge::kStart, 0};
  GuardedBuffer absmax{kExperts * kN * kK / 64 * 4, Edge::kStart, 0};
  GuardedBuffer x{kTokens * kK * 2, Edge::kStart, 0};
  GuardedBuffer y{kM * kN * 2, Edge::kStart, 0};
  GuardedBuffer ends{kExperts * 4, Edge::kStart, 0};
  GuardedBuffer x_index{kM * 4, Edge::kStart, 0};
  GuardedBuffer bias{kExperts * kN * 2, Edge::kStart, 0};
  GuardedBuffer row_scale{kM * 4, Edge::kStart, 0};
  GuardedBuffer workspace{1 << 20, Edge::kStart, 0};
  nf4_tensor tensor{};
  nf4_grouped_args args{};
  const nf4_grouped_args *given = &args;
  int32_t threads = 1;

  Call() {
    tensor.struct_size = sizeof tensor;
    tensor.format = NF4_FORMAT_NF4;
    tensor.blocksize = 64;
    tensor.rows = kExperts * kN;
    tensor.cols = kK;
    tensor.packed = packed.data();
    tensor.absmax = absmax.data();
    const int32_t of_experts[kExperts] = {2, 2, 5}, rows[kM] = {0, 1, 1, 0, 7};
    std::memcpy(ends.data(), of_experts, sizeof of_experts);
    std::memcpy(x_index.data(), rows, sizeof rows);
    args = {sizeof args,
            NF4_DTYPE_BF16,
            kExperts,
            kM,
            x.data(),
            kK,
            kTokens,
            y.data(),
            kN,
            integers(ends),
            integers(x_index),
            bias.data(),
            kN,
            reinterpret_cast<const float *>(row_scale.data())};
  }
  static const int32_t *integers(const GuardedBuffer &buffer) {
    return reinterpret_cast<const int32_t *>(buffer.data());
  }

  nf4_status run(bool launch) {
    if (!launch) return nf4_matmul_grouped_cpu(&tensor, given, threads);
    return nf4_matmul_grouped_launch(&tensor, given, workspace.data(), workspace.size(), nullptr);
  }
  bool untouched() const { return y.untouched() && workspace.untouched(); }
};

enum class Who { kBoth, kCpu, kLaunch };

struct Fault {
  Who who;
  std::function<void(Call &)> change;
  std::string detail;
};

const std::vector<Fault> kFaults = {
    {Who::kBoth, [](Call &c) { c.given = nullptr; }, "the nf4_grouped_args is NULL"},
    {Who::kBoth, [](Call &c) { c.args.struct_size = 96; },
     "nf4_grouped_args.struct_size is 96; this library knows 104"},
    {Who::kBoth, [](Call &c) { c.args.dtype = 4; }, "dtype is 4; expected 1 (fp32), 2 (fp16)"},
    {Who::kLaunch,
     [](Call &c) {
       c.args.dtype = NF4_DTYPE_FP32;
       c.args.m = 1;
       c.args.x_rows = 1;
       c.args.experts = 1;
       c.args.y_stride = c.args.bias_stride = kExperts * kN;
       c.args.y = c.workspace.data() + (1 << 19);
       c.args.bias = nullptr;
     },
     "dtype is 1 (fp32); expected 2 (fp16) or 3 (bf16) on a GPU"},
    {Who::kBoth, [](Call &c) { c.args.experts = -1; }, "experts is -1; expected 0 or more"},
    {Who::kBoth, [](Call &c) { c.args.experts = 0; },
     "experts is 0, but the weight has 12 rows; expected none"},
    {Who::kBoth, [](Call &c) { c.args.experts = 5; },
     "experts is 5; expected a divisor of the weight's 12 rows"},
    {Who::kBoth, [](Call &c) { c.args.experts = 12; },
     "an expert has 96 elements; expected a multiple of the blocksize, 64"},
    {Who::kBoth, [](Call &c) { c.args.m = -1; }, "m is -1; expected 0 to 2^31 - 1"},
    {Who::kBoth, [](Call &c) { c.args.m = int64_t{1} << 31; },
     "m is 2147483648; expected 0 to 2^31 - 1"},
    {Who::kBoth, [](Call &c) { c.args.x_rows = -1; }, "x_rows is -1; expected 0 or more"},
    {Who::kBoth, [](Call &c) { c.args.x_index = nullptr; },
     "x_rows is 2; expected at least m, 5, without x_index"},
    {Who::kBoth, [](Call &c) { c.args.x_stride = kK - 1; }, "x_stride is 95; expected at least 96"},
    {Who::kBoth, [](Call &c) { c.args.y_stride = kN - 1; }, "y_stride is 3; expected at least 4"},
    {Who::kBoth, [](Call &c) { c.args.bias_stride = kN - 1; },
     "bias_stride is 3; expected at least 4"},
    {Who::kBoth, [](Call &c) { c.args.x_stride = INT64_MAX; },
     "x_rows * x_stride is 2 * 9223372036854775807; expected at most 2^60"},
    {Who::kBoth, [](Call &c) { c.args.y_stride = INT64_MAX; },
     "m * y_stride is 5 * 9223372036854775807; expected at most 2^60"},
    {Who::kBoth, [](Call &c) { c.args.bias_stride = INT64_MAX; },
     "experts * bias_stride is 3 * 9223372036854775807; expected at most 2^60"},
    {Who::kBoth, [](Call &c) { c.args.x = nullptr; }, "x is NULL"},
    {Who::kBoth, [](Call &c) { c.args.y = nullptr; }, "y is NULL"},
    {Who::kBoth, [](Call &c) { c.args.ends = nullptr; }, "ends is NULL"},
    {Who::kBoth, [](Call &c) { c.tensor.packed = nullptr; }, "packed is NULL"},
    {Who::kBoth, [](Call &c) { c.args.x = c.x.data() + 1; }, "x is 0x"},
    {Who::kBoth,
     [](Call &c) { c.args.ends = reinterpret_cast<const int32_t *>(c.ends.data() + 2); },
     "ends is 0x"},
    {Who::kBoth,
     [](Call &c) { c.args.x_index = reinterpret_cast<const int32_t *>(c.x_index.data() + 2); },
     "x_index is 0x"},
    {Who::kBoth,
     [](Call &c) { c.args.row_scale = reinterpret_cast<const float *>(c.row_scale.data() + 2); },
     "row_scale is 0x"},
    {Who::kBoth, [](Call &c) { c.args.y = c.x.data(); }, "x overlaps y"},
    {Who::kBoth, [](Call &c) { c.args.ends = Call::integers(c.y); }, "ends overlaps y"},
    {Who::kBoth, [](Call &c) { c.args.x_index = Call::integers(c.y); }, "x_index overlaps y"},
    {Who::kBoth, [](Call &c) { c.args.bias = c.y.data(); }, "bias overlaps y"},
    {Who::kBoth, [](Call &c) { c.args.row_scale = reinterpret_cast<const float *>(c.y.data()); },
     "row_scale overlaps y"},
    {Who::kCpu, [](Call &c) { c.threads = -1; }, "threads is -1; expected 0 or more"},
};

}  // namespace

TEST_CASE("a bad argument of a product of experts is named, and nothing is written", "[api]") {
  for (const Fault &fault : kFaults)
    for (const bool launch : {false, true}) {
      if (fault.who != Who::kBoth && (fault.who == Who::kLaunch) != launch) continue;
      INFO(fault.detail << (launch ? ", launch" : ""));
      Call call;
      fault.change(call);
      CHECK(call.run(launch) == NF4_STATUS_INVALID_ARGUMENT);
      const std::string error = nf4_last_error();
      CHECK(error.substr(0, fault.detail.size()) == fault.detail);
      CHECK(call.untouched());
    }
}

TEST_CASE("the product of experts that the table breaks is right", "[api]") {
  Call call;
  CHECK(call.run(false) == NF4_STATUS_OK);
  CHECK(!call.y.untouched());
}

TEST_CASE("without a bias its stride is not read", "[api]") {
  Call call;
  call.args.bias = nullptr;
  REQUIRE(call.run(false) == NF4_STATUS_OK);
  const std::vector<uint8_t> expected(call.y.data(), call.y.data() + call.y.size());
  for (const int64_t stride : {INT64_MIN, INT64_MAX}) {
    call.args.bias_stride = stride;
    CHECK(call.run(false) == NF4_STATUS_OK);
    CHECK(std::equal(expected.begin(), expected.end(), call.y.data()));
  }
}

TEST_CASE("the workspace of a product of experts needs no pointers, and does not decrease with m",
          "[api]") {
  Call call;
  call.tensor.packed = call.tensor.absmax = nullptr;
  call.args.x = call.args.y = nullptr;
  call.args.ends = nullptr;
  call.tensor.cols = call.args.x_stride = 128;
  size_t before = 0, bytes = 1;
  for (const int64_t m : {0, 1, 5, 100, 4096}) {
    call.args.m = m;
    REQUIRE(nf4_matmul_grouped_workspace_size(&call.tensor, &call.args, &bytes) == NF4_STATUS_OK);
    CHECK(bytes >= before);
    before = bytes;
  }
  CHECK(before > 0);
  call.args.x_index = nullptr;
  call.args.x_rows = call.args.m;
  REQUIRE(nf4_matmul_grouped_workspace_size(&call.tensor, &call.args, &bytes) == NF4_STATUS_OK);
  CHECK(bytes == 0);
  CHECK(nf4_matmul_grouped_workspace_size(&call.tensor, &call.args, nullptr) ==
        NF4_STATUS_INVALID_ARGUMENT);
  CHECK(std::string(nf4_last_error()) == "bytes is NULL");
}

TEST_CASE("a workspace of a product of experts that does not fit is named", "[api]") {
  Call call;
  call.tensor.cols = call.args.x_stride = 128;
  call.args.m = 100;
  size_t bytes = 0;
  REQUIRE(nf4_matmul_grouped_workspace_size(&call.tensor, &call.args, &bytes) == NF4_STATUS_OK);
  REQUIRE(bytes > 1);
  for (const size_t given : {size_t{0}, bytes - 1}) {
    CHECK(nf4_matmul_grouped_launch(&call.tensor, &call.args, call.workspace.data(), given,
                                    nullptr) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(std::string(nf4_last_error()).find("workspace") != std::string::npos);
  }
  for (void *place : {static_cast<void *>(nullptr), static_cast<void *>(call.workspace.data() + 1),
                      static_cast<void *>(call.y.data())})
    CHECK(nf4_matmul_grouped_launch(&call.tensor, &call.args, place, bytes, nullptr) ==
          NF4_STATUS_INVALID_ARGUMENT);
}

TEST_CASE("an empty product of experts needs no pointers", "[api]") {
  for (const bool launch : {false, true})
    for (const int64_t m : {0, 64}) {
      Call call;
      call.tensor = {};
      call.tensor.struct_size = sizeof call.tensor;
      call.tensor.format = NF4_FORMAT_NF4;
      call.tensor.blocksize = 64;
      call.tensor.cols = 64;
      call.args = {};
      call.args.struct_size = sizeof call.args;
      call.args.dtype = NF4_DTYPE_BF16;
      call.args.x_stride = call.args.y_stride = 64;
      call.args.m = call.args.x_rows = m;
      CHECK(call.run(launch) == NF4_STATUS_OK);
      CHECK(call.untouched());
    }
}
