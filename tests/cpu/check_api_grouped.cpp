// The arguments of products of experts and of their gradient.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/catch.hpp"
#include "support/faults.hpp"
#include "support/guarded.hpp"

using namespace nf4::test;

namespace {

constexpr int32_t kExperts = 3;
constexpr int64_t kN = 8, kK = 96, kM = 5, kMostM = 100, kTokens = 2;

// A right product of a codebook weight or of an integer one, or a gradient of the former, to be
// made wrong. Integers are of AWQ, one group a row.
struct Call {
  const bool of_integers, of_gradient;
  GuardedBuffer packed{kExperts * kN * kK / 2, Edge::kStart, 0};
  GuardedBuffer scales{kExperts * kN * kK / 64 * 4, Edge::kStart, 0};
  GuardedBuffer zeros{kExperts * kN / 2, Edge::kStart, 0};
  GuardedBuffer columns{kExperts * kK * 4, Edge::kStart, 0};
  GuardedBuffer x{kTokens * kK * 2, Edge::kStart, 0};
  GuardedBuffer y{kMostM * kK * 2, Edge::kStart, 0};
  GuardedBuffer ends{kExperts * 4, Edge::kStart, 0};
  GuardedBuffer x_index{kMostM * 4, Edge::kStart, 0};
  GuardedBuffer bias{kExperts * kN * 2, Edge::kStart, 0};
  GuardedBuffer row_scale{kMostM * 4, Edge::kStart, 0};
  GuardedBuffer gathered{1 << 20, Edge::kStart, 0};
  nf4_tensor codes{};
  nf4_int4_tensor weight{};
  nf4_grouped_args args{};
  const nf4_grouped_args *given = &args;
  void *workspace = gathered.data();
  size_t workspace_bytes = gathered.size();
  int32_t threads = 1;

  static constexpr int kForms[] = {kAll};
  static const std::vector<Function<Call>> &functions();

  explicit Call(int who)
      : of_integers((who & kIntegers) != 0), of_gradient((who & kGradient) != 0) {
    codes.struct_size = sizeof codes;
    codes.format = NF4_FORMAT_NF4;
    codes.blocksize = 64;
    codes.rows = kExperts * kN;
    codes.cols = kK;
    codes.packed = packed.data();
    codes.absmax = scales.data();
    weight.struct_size = sizeof weight;
    weight.layout = NF4_INT4_AWQ;
    weight.scales_dtype = NF4_DTYPE_BF16;
    weight.group_size = -1;
    weight.rows = kN;
    weight.cols = kK;
    weight.packed = packed.data();
    weight.scales = scales.data();
    weight.zeros = zeros.data();
    const int32_t of_experts[kExperts] = {2, 2, 5}, rows[kM] = {0, 1, 1, 0, 7};
    std::memcpy(ends.data(), of_experts, sizeof of_experts);
    std::memcpy(x_index.data(), rows, sizeof rows);
    args = {
        sizeof args, NF4_DTYPE_BF16,        kExperts,          kM,
        x.data(),    of_gradient ? kN : kK, kTokens,           y.data(),
        y_columns(), integers(ends),        integers(x_index), of_gradient ? nullptr : bias.data(),
        kN,          floats(row_scale)};
  }
  int64_t y_columns() const { return of_gradient ? kK : kN; }

  nf4_status run(bool launch) const {
    if (of_integers && launch)
      return nf4_int4_matmul_grouped_launch(&weight, given, workspace, workspace_bytes, nullptr);
    if (of_integers) return nf4_int4_matmul_grouped_cpu(&weight, given, threads);
    if (launch)
      return (of_gradient ? nf4_matmul_grouped_grad_launch : nf4_matmul_grouped_launch)(
          &codes, given, workspace, workspace_bytes, nullptr);
    return (of_gradient ? nf4_matmul_grouped_grad_cpu : nf4_matmul_grouped_cpu)(&codes, given,
                                                                                threads);
  }
  nf4_status workspace_size(size_t *bytes) const {
    if (of_integers) return nf4_int4_matmul_grouped_workspace_size(&weight, &args, bytes);
    return (of_gradient ? nf4_matmul_grouped_grad_workspace_size
                        : nf4_matmul_grouped_workspace_size)(&codes, &args, bytes);
  }
  // A row of 16-bit x for each row of y.
  int64_t gathered_bytes() const { return args.m * args.x_stride * 2; }
  // A product's columns for which there are kernels that need workspace.
  void widen() {
    if (!of_gradient) codes.cols = weight.cols = args.x_stride = 128;
  }
  bool untouched() const { return y.untouched() && gathered.untouched(); }
};

const std::vector<Function<Call>> &Call::functions() {
  static const std::vector<Function<Call>> list = {
      {"nf4_matmul_grouped_cpu", kMultiply | kFlat | kCpu, [](Call &c) { return c.run(false); }},
      {"nf4_matmul_grouped_launch", kMultiply | kFlat | kLaunch,
       [](Call &c) { return c.run(true); }},
      {"nf4_matmul_grouped_grad_cpu", kGradient | kFlat | kCpu,
       [](Call &c) { return c.run(false); }},
      {"nf4_matmul_grouped_grad_launch", kGradient | kFlat | kLaunch,
       [](Call &c) { return c.run(true); }},
      {"nf4_int4_matmul_grouped_cpu", kMultiply | kAwq | kCpu,
       [](Call &c) { return c.run(false); }},
      {"nf4_int4_matmul_grouped_launch", kMultiply | kAwq | kLaunch,
       [](Call &c) { return c.run(true); }},
  };
  return list;
}
// A call of each: a product, a gradient, and a product of integers.
constexpr int kCalls[] = {kMultiply | kFlat, kGradient | kFlat, kMultiply | kAwq};

const std::vector<Fault<Call>> kFaults = {
    {kAll, [](Call &c) { c.given = nullptr; }, "the nf4_grouped_args is NULL"},
    {kAll, [](Call &c) { c.args.struct_size = 96; },
     "nf4_grouped_args.struct_size is 96; this library knows 104"},
    {kAll, [](Call &c) { c.args.dtype = 4; }, "dtype is 4; expected 1 (fp32), 2 (fp16)"},
    {kLaunch,
     [](Call &c) {
       c.args.dtype = NF4_DTYPE_FP32;
       c.args.m = 1;
     },
     "dtype is 1 (fp32); expected 2 (fp16) or 3 (bf16) on a GPU"},
    // A matmul on a GPU takes a few rows of fp32; a product of one expert does not.
    {kMultiply | kFlat | kLaunch,
     [](Call &c) {
       c.args.dtype = NF4_DTYPE_FP32;
       c.args.m = c.args.x_rows = c.args.experts = 1;
       c.args.y_stride = kExperts * kN;
       c.args.bias = nullptr;
     },
     "dtype is 1 (fp32); expected 2 (fp16) or 3 (bf16) on a GPU"},
    {kAll, [](Call &c) { c.args.experts = -1; }, "experts is -1; expected 0 or more"},
    {kFlat, [](Call &c) { c.args.experts = 0; },
     "experts is 0, but the weight has 24 rows; expected none"},
    {kFlat, [](Call &c) { c.args.experts = 5; },
     "experts is 5; expected a divisor of the weight's 24 rows"},
    {kFlat, [](Call &c) { c.args.experts = 24; },
     "an expert has 96 elements; expected a multiple of the blocksize, 64"},
    {kAll, [](Call &c) { c.args.m = -1; }, "m is -1; expected 0 to 2^31 - 1"},
    {kAll, [](Call &c) { c.args.m = int64_t{1} << 31; }, "m is 2147483648; expected 0 to 2^31 - 1"},
    {kAll, [](Call &c) { c.args.x_rows = -1; }, "x_rows is -1; expected 0 or more"},
    {kAll, [](Call &c) { c.args.x_index = nullptr; },
     "x_rows is 2; expected at least m, 5, without x_index"},
    {kMultiply, [](Call &c) { c.args.x_stride = kK - 1; }, "x_stride is 95; expected at least 96"},
    {kMultiply, [](Call &c) { c.args.y_stride = kN - 1; }, "y_stride is 7; expected at least 8"},
    {kGradient, [](Call &c) { c.args.x_stride = kN - 1; }, "x_stride is 7; expected at least 8"},
    {kGradient, [](Call &c) { c.args.y_stride = kK - 1; }, "y_stride is 95; expected at least 96"},
    {kMultiply, [](Call &c) { c.args.bias_stride = kN - 1; },
     "bias_stride is 7; expected at least 8"},
    {kAll, [](Call &c) { c.args.x_stride = INT64_MAX; },
     "x_rows * x_stride is 2 * 9223372036854775807; expected at most 2^60"},
    {kAll, [](Call &c) { c.args.y_stride = INT64_MAX; },
     "m * y_stride is 5 * 9223372036854775807; expected at most 2^60"},
    {kMultiply, [](Call &c) { c.args.bias_stride = INT64_MAX; },
     "experts * bias_stride is 3 * 9223372036854775807; expected at most 2^60"},
    {kGradient, [](Call &c) { c.args.bias = c.bias.data(); },
     "bias is not NULL; expected NULL in the gradient"},
    {kAll, [](Call &c) { c.args.x = nullptr; }, "x is NULL"},
    {kAll, [](Call &c) { c.args.y = nullptr; }, "y is NULL"},
    {kAll, [](Call &c) { c.args.ends = nullptr; }, "ends is NULL"},
    {kAll, [](Call &c) { c.codes.packed = c.weight.packed = nullptr; }, "packed is NULL"},
    {kAll, [](Call &c) { c.args.x = moved(c.args.x, 1); }, "x is 0x"},
    {kAll, [](Call &c) { c.args.ends = moved(c.args.ends, 2); }, "ends is 0x"},
    {kAll, [](Call &c) { c.args.x_index = moved(c.args.x_index, 2); }, "x_index is 0x"},
    {kAll, [](Call &c) { c.args.row_scale = moved(c.args.row_scale, 2); }, "row_scale is 0x"},
    {kAll, [](Call &c) { c.args.y = c.x.data(); }, "x overlaps y"},
    // The last element of dy is read.
    {kGradient, [](Call &c) { c.args.y = c.x.data() + (kTokens * kN - 1) * 2; }, "x overlaps y"},
    {kAll, [](Call &c) { c.args.ends = integers(c.y); }, "ends overlaps y"},
    {kAll, [](Call &c) { c.args.x_index = integers(c.y); }, "x_index overlaps y"},
    {kMultiply, [](Call &c) { c.args.bias = c.y.data(); }, "bias overlaps y"},
    {kAll, [](Call &c) { c.args.row_scale = floats(c.y); }, "row_scale overlaps y"},
    {kCpu, [](Call &c) { c.threads = -1; }, "threads is -1; expected 0 or more"},
    {kAwq,
     [](Call &c) {
       c.weight.rows = c.args.y_stride = int64_t{1} << 53;
       c.args.m = 1;
     },
     "experts * rows * cols is 3 * 9007199254740992 * 96; expected at most 2^60"},
    {kAwq, [](Call &c) { c.weight.rows = 12; },
     "rows is 12; expected a multiple of 8 in the AWQ layout"},
    {kAwq, [](Call &c) { c.weight.group_size = 64; },
     "group_size is 64; expected a divisor of cols, 96, or -1"},
    // Parts of the last expert.
    {kAwq, [](Call &c) { c.args.y = c.packed.data() + kExperts * kN * kK / 2 - 4; },
     "packed overlaps y"},
    {kAwq, [](Call &c) { c.args.y = c.scales.data() + kExperts * kN * 2 - 2; },
     "scales overlaps y"},
    {kAwq, [](Call &c) { c.args.y = c.zeros.data() + kExperts * kN / 2 - 4; }, "zeros overlaps y"},
    {kAwq | kCpu,
     [](Call &c) {
       c.weight.g_idx = integers(c.columns);
       c.args.y = c.columns.data() + kExperts * kK * 4 - 4;
     },
     "g_idx overlaps y"},
    {kAwq | kLaunch, [](Call &c) { c.weight.g_idx = integers(c.columns); },
     "g_idx is not NULL; expected NULL for experts on a GPU"},
    {kAwq | kLaunch, [](Call &c) { c.weight.permutation = integers(c.columns); },
     "permutation is not NULL; expected NULL for experts on a GPU"},
};

// Calls whose workspace does not fit.
const std::vector<Fault<Call>> kMisfits = {
    {kLaunch, [](Call &c) { c.workspace_bytes = 0; }, "workspace_bytes is 0"},
    {kLaunch, [](Call &c) { --c.workspace_bytes; }, "workspace_bytes is "},
    {kLaunch, [](Call &c) { c.workspace = nullptr; }, "workspace is NULL"},
    {kLaunch, [](Call &c) { c.workspace = c.gathered.data() + 8; }, "workspace is 0x"},
    {kLaunch, [](Call &c) { c.workspace = c.y.data(); }, "workspace overlaps y"},
    {kLaunch, [](Call &c) { c.args.x = c.gathered.data(); }, "x overlaps workspace"},
};

}  // namespace

TEST_CASE("a bad argument of a product of experts is named, and nothing is written", "[api]") {
  check_faults(kFaults);
}

TEST_CASE("the products of experts that the table breaks are right", "[api]") {
  check_right_calls<Call>([](Call &) {});
}

TEST_CASE("without a bias its stride is not read", "[api]") {
  for (const int who : kCalls) {
    Call call(who);
    call.args.bias = nullptr;
    REQUIRE(call.run(false) == NF4_STATUS_OK);
    const std::vector<uint8_t> expected(call.y.data(), call.y.data() + call.y.size());
    for (const int64_t stride : {INT64_MIN, INT64_MAX}) {
      call.args.bias_stride = stride;
      CHECK(call.run(false) == NF4_STATUS_OK);
      CHECK(std::equal(expected.begin(), expected.end(), call.y.data()));
    }
  }
}

// Experts of integers and a gradient gather the rows of x; a product of codes does more.
TEST_CASE("the workspace of experts needs no pointers, and does not decrease with m", "[api]") {
  for (const int who : kCalls) {
    INFO("who " << who);
    Call call(who);
    call.widen();
    call.codes.packed = call.codes.absmax = nullptr;
    call.weight.packed = call.weight.scales = call.weight.zeros = nullptr;
    call.args.x = call.args.y = nullptr;
    call.args.ends = nullptr;
    size_t before = 0, bytes = 1;
    for (const int64_t m : {0, 1, 5, 100, 4096}) {
      call.args.m = m;
      REQUIRE(call.workspace_size(&bytes) == NF4_STATUS_OK);
      CHECK(bytes >= before);
      if (call.of_integers || call.of_gradient)
        CHECK(static_cast<int64_t>(bytes) == call.gathered_bytes());
      before = bytes;
    }
    CHECK(before > 0);
    call.args.x_index = nullptr;
    call.args.x_rows = call.args.m;
    REQUIRE(call.workspace_size(&bytes) == NF4_STATUS_OK);
    CHECK(bytes == 0);
    CHECK(call.workspace_size(nullptr) == NF4_STATUS_INVALID_ARGUMENT);
    check_last_error("bytes is NULL");
  }
}

TEST_CASE("a workspace of experts that does not fit is named", "[api]") {
  for (const int who : kCalls)
    for (const Fault<Call> &misfit : kMisfits) {
      INFO("who " << who << ", " << misfit.detail);
      Call call(who);
      call.widen();
      call.args.m = kMostM;
      REQUIRE(call.workspace_size(&call.workspace_bytes) == NF4_STATUS_OK);
      REQUIRE(call.workspace_bytes > 1);
      misfit.change(call);
      CHECK(call.run(true) == NF4_STATUS_INVALID_ARGUMENT);
      check_last_error(misfit.detail);
      CHECK(call.untouched());
    }
}

TEST_CASE("an empty product of experts needs no pointers", "[api]") {
  for (const int who : {kMultiply | kFlat, kGradient | kFlat})
    for (const bool launch : {false, true})
      for (const int64_t m : {0, 64}) {
        Call call(who);
        call.codes.rows = 0;
        call.codes.packed = call.codes.absmax = nullptr;
        call.codes.cols = call.of_gradient && m != 0 ? 0 : 64;
        call.args = {};
        call.args.struct_size = sizeof call.args;
        call.args.dtype = NF4_DTYPE_BF16;
        call.args.x_stride = call.args.y_stride = 64;
        call.args.m = call.args.x_rows = m;
        CHECK(call.run(launch) == NF4_STATUS_OK);
        CHECK(call.untouched());
      }
}
