// The arguments of the gradient of products of experts, and of experts of integers: those that
// check_api_grouped.cpp does not have.
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
constexpr int64_t kN = 8, kK = 64, kM = 5;

// A right gradient or product, to be made wrong. Integers are of AWQ, one group a row.
struct Call {
  bool integers;
  GuardedBuffer packed{kExperts * kN * kK / 2, Edge::kStart, 0};
  GuardedBuffer scales{kExperts * kN * 4, Edge::kStart, 0};
  GuardedBuffer zeros{kExperts * kN / 2, Edge::kStart, 0};
  GuardedBuffer columns{kExperts * kK * 4, Edge::kStart, 0};
  GuardedBuffer x{kM * kK * 2, Edge::kStart, 0};
  GuardedBuffer y{kM * kK * 2, Edge::kStart, 0};
  GuardedBuffer ends{kExperts * 4, Edge::kStart, 0};
  GuardedBuffer x_index{kM * 4, Edge::kStart, 0};
  GuardedBuffer gathered{kM * kK * 2 + 16, Edge::kStart, 0};
  nf4_tensor codes{};
  nf4_int4_tensor weight{};
  nf4_grouped_args args{};
  void *workspace = nullptr;
  size_t workspace_bytes = 0;
  int32_t threads = 1;

  explicit Call(bool of_integers) : integers(of_integers) {
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
    const int32_t of_experts[kExperts] = {2, 2, 5};
    std::memcpy(ends.data(), of_experts, sizeof of_experts);
    args.struct_size = sizeof args;
    args.dtype = NF4_DTYPE_BF16;
    args.experts = kExperts;
    args.m = args.x_rows = kM;
    args.x = x.data();
    args.x_stride = integers ? kK : kN;
    args.y = y.data();
    args.y_stride = integers ? kN : kK;
    args.ends = reinterpret_cast<const int32_t *>(ends.data());
  }

  // Rows of x in another order than those of y, which a launch gathers in its workspace.
  void set_x_index() {
    args.x_index = reinterpret_cast<const int32_t *>(x_index.data());
    workspace = gathered.data();
    workspace_bytes = static_cast<size_t>(gathered_bytes());
  }
  // A row of 16-bit x for each row of y: K columns in a product, N in a gradient.
  int64_t gathered_bytes() const { return args.m * (integers ? kK : kN) * 2; }

  nf4_status run(bool launch) {
    if (integers && launch)
      return nf4_int4_matmul_grouped_launch(&weight, &args, workspace, workspace_bytes, nullptr);
    if (integers) return nf4_int4_matmul_grouped_cpu(&weight, &args, threads);
    if (launch)
      return nf4_matmul_grouped_grad_launch(&codes, &args, workspace, workspace_bytes, nullptr);
    return nf4_matmul_grouped_grad_cpu(&codes, &args, threads);
  }
  nf4_status workspace_size(size_t *bytes) const {
    return integers ? nf4_int4_matmul_grouped_workspace_size(&weight, &args, bytes)
                    : nf4_matmul_grouped_grad_workspace_size(&codes, &args, bytes);
  }
};

enum class Who { kBoth, kCpu, kLaunch };

struct Fault {
  bool integers;
  Who who;
  std::function<void(Call &)> change;
  std::string detail;
};

const std::vector<Fault> kFaults = {
    {false, Who::kBoth, [](Call &c) { c.args.x_stride = kN - 1; },
     "x_stride is 7; expected at least 8"},
    {false, Who::kBoth, [](Call &c) { c.args.y_stride = kK - 1; },
     "y_stride is 63; expected at least 64"},
    {false, Who::kBoth, [](Call &c) { c.args.bias = c.x.data(), c.args.bias_stride = kN; },
     "bias is not NULL; expected NULL in the gradient"},
    {false, Who::kBoth, [](Call &c) { c.args.x = nullptr; }, "x is NULL"},
    {false, Who::kBoth, [](Call &c) { c.args.y = c.x.data(); }, "x overlaps y"},
    // The last element of dy is read.
    {false, Who::kBoth, [](Call &c) { c.args.y = c.x.data() + (kM * kN - 1) * 2; }, "x overlaps y"},
    {false, Who::kLaunch,
     [](Call &c) {
       c.args.dtype = NF4_DTYPE_FP32;
       c.args.m = 1;
     },
     "dtype is 1 (fp32); expected 2 (fp16) or 3 (bf16) on a GPU"},
    {false, Who::kCpu, [](Call &c) { c.threads = -1; }, "threads is -1; expected 0 or more"},
    {true, Who::kBoth, [](Call &c) { c.args.experts = -1; }, "experts is -1; expected 0 or more"},
    {true, Who::kBoth,
     [](Call &c) {
       c.weight.rows = c.args.y_stride = int64_t{1} << 53;
       c.args.m = 1;
     },
     "experts * rows * cols is 3 * 9007199254740992 * 64; expected at most 2^60"},
    {true, Who::kBoth, [](Call &c) { c.weight.rows = 12; },
     "rows is 12; expected a multiple of 8 in the AWQ layout"},
    {true, Who::kBoth, [](Call &c) { c.weight.group_size = 48; },
     "group_size is 48; expected a divisor of cols, 64, or -1"},
    {true, Who::kBoth, [](Call &c) { c.args.x_stride = kK - 1; },
     "x_stride is 63; expected at least 64"},
    {true, Who::kBoth, [](Call &c) { c.args.bias = c.x.data(), c.args.bias_stride = kN - 1; },
     "bias_stride is 7; expected at least 8"},
    // Parts of the last expert.
    {true, Who::kBoth, [](Call &c) { c.args.y = c.packed.data() + kExperts * kN * kK / 2 - 4; },
     "packed overlaps y"},
    {true, Who::kBoth, [](Call &c) { c.args.y = c.scales.data() + kExperts * kN * 2 - 2; },
     "scales overlaps y"},
    {true, Who::kBoth, [](Call &c) { c.args.y = c.zeros.data() + kExperts * kN / 2 - 4; },
     "zeros overlaps y"},
    {true, Who::kCpu,
     [](Call &c) {
       c.weight.g_idx = reinterpret_cast<const int32_t *>(c.columns.data());
       c.args.y = c.columns.data() + kExperts * kK * 4 - 4;
     },
     "g_idx overlaps y"},
    {true, Who::kLaunch,
     [](Call &c) { c.weight.g_idx = reinterpret_cast<const int32_t *>(c.columns.data()); },
     "g_idx is not NULL; expected NULL for experts on a GPU"},
    {true, Who::kLaunch,
     [](Call &c) { c.weight.permutation = reinterpret_cast<const int32_t *>(c.columns.data()); },
     "permutation is not NULL; expected NULL for experts on a GPU"},
    {true, Who::kLaunch,
     [](Call &c) {
       c.args.dtype = NF4_DTYPE_FP32;
       c.args.m = 1;
     },
     "dtype is 1 (fp32); expected 2 (fp16) or 3 (bf16) on a GPU"},
};

}  // namespace

TEST_CASE("a bad argument of experts of integers, or of a gradient, is named", "[api]") {
  for (const Fault &fault : kFaults)
    for (const bool launch : {false, true}) {
      if (fault.who != Who::kBoth && (fault.who == Who::kLaunch) != launch) continue;
      INFO(fault.detail << (launch ? ", launch" : ""));
      Call call(fault.integers);
      fault.change(call);
      CHECK(call.run(launch) == NF4_STATUS_INVALID_ARGUMENT);
      const std::string error = nf4_last_error();
      CHECK(error.substr(0, fault.detail.size()) == fault.detail);
      CHECK(call.y.untouched());
    }
}

TEST_CASE("the calls of experts that the table breaks are right", "[api]") {
  for (const bool integers : {false, true}) {
    Call call(integers);
    CHECK(call.run(false) == NF4_STATUS_OK);
    CHECK(!call.y.untouched());
  }
}

TEST_CASE("the workspace of experts of integers, and of a gradient, is the rows that x_index names",
          "[api]") {
  for (const bool integers : {false, true}) {
    INFO((integers ? "integers" : "gradient"));
    Call call(integers);
    call.set_x_index();
    call.codes.packed = call.codes.absmax = nullptr;
    call.weight.packed = call.weight.scales = call.weight.zeros = nullptr;
    call.args.x = call.args.y = nullptr;
    call.args.ends = nullptr;
    size_t bytes = 1;
    for (const int64_t m : {0, 1, 5, 100, 4096}) {
      call.args.m = m;
      REQUIRE(call.workspace_size(&bytes) == NF4_STATUS_OK);
      CHECK(static_cast<int64_t>(bytes) == call.gathered_bytes());
    }
    call.args.x_index = nullptr;
    call.args.x_rows = call.args.m;
    REQUIRE(call.workspace_size(&bytes) == NF4_STATUS_OK);
    CHECK(bytes == 0);
    CHECK(call.workspace_size(nullptr) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(std::string(nf4_last_error()) == "bytes is NULL");
  }
}

TEST_CASE("a workspace of experts of integers, or of a gradient, that does not fit is named",
          "[api]") {
  struct Misfit {
    std::function<void(Call &)> change;
    std::string detail;
  };
  const Misfit misfits[] = {
      {[](Call &c) { --c.workspace_bytes; }, "workspace_bytes is "},
      {[](Call &c) { c.workspace = nullptr; }, "workspace is NULL"},
      {[](Call &c) { c.workspace = c.gathered.data() + 8; }, "workspace is 0x"},
      {[](Call &c) { c.workspace = c.y.data(); }, "workspace overlaps y"},
      {[](Call &c) { c.args.x = c.gathered.data(); }, "x overlaps workspace"},
  };
  for (const bool integers : {false, true})
    for (const Misfit &misfit : misfits) {
      INFO((integers ? "integers: " : "gradient: ") << misfit.detail);
      Call call(integers);
      call.set_x_index();
      misfit.change(call);
      CHECK(call.run(true) == NF4_STATUS_INVALID_ARGUMENT);
      const std::string error = nf4_last_error();
      CHECK(error.substr(0, misfit.detail.size()) == misfit.detail);
      CHECK(call.y.untouched());
      CHECK(call.gathered.untouched());
    }
}
