// Arguments that only the gradient has, and those of an adapter, which product and gradient share.
#include <cmath>
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

constexpr int64_t kRows = 6, kCols = 96, kM = 2;
constexpr int32_t kRank = 4;

// A right product or gradient with an adapter, to be made wrong.
struct Call {
  bool gradient;
  GuardedBuffer packed{kRows * kCols / 2, Edge::kStart, 0};
  GuardedBuffer absmax{kRows * kCols / 64 * 4, Edge::kStart, 0};
  GuardedBuffer x{kM * kCols * 4, Edge::kStart, 0};
  GuardedBuffer y{kM * kCols * 4, Edge::kStart, 0};
  GuardedBuffer a{kRank * kCols * 4, Edge::kStart, 0};
  GuardedBuffer b{kRows * kRank * 4, Edge::kStart, 0};
  GuardedBuffer product{kM * kRank * 4, Edge::kStart, 0};
  GuardedBuffer workspace{4096, Edge::kStart, 0};
  nf4_tensor tensor{};
  nf4_lora lora{};
  nf4_matmul_args args{};
  size_t workspace_bytes = 4096;

  static constexpr int kForms[] = {kAll};
  static const std::vector<Function<Call>> &functions();

  explicit Call(int who) : gradient((who & kGradient) != 0) {
    tensor.struct_size = sizeof tensor;
    tensor.format = NF4_FORMAT_NF4;
    tensor.blocksize = 64;
    tensor.rows = kRows;
    tensor.cols = kCols;
    tensor.packed = packed.data();
    tensor.absmax = absmax.data();
    lora = {sizeof lora, NF4_DTYPE_BF16, kRank,    0.5f,  0,
            a.data(),    kCols,          b.data(), kRank, product.data()};
    args = {sizeof args, NF4_DTYPE_BF16, 0,
            kM,          x.data(),       gradient ? kRows : kCols,
            nullptr,     y.data(),       gradient ? kCols : kRows,
            &lora};
  }

  nf4_status run(bool launch) {
    if (!launch) return (gradient ? nf4_matmul_grad_cpu : nf4_matmul_cpu)(&tensor, &args, 1);
    return (gradient ? nf4_matmul_grad_launch : nf4_matmul_launch)(&tensor, &args, workspace.data(),
                                                                   workspace_bytes, nullptr);
  }
  nf4_status workspace_size(size_t *bytes) const {
    return (gradient ? nf4_matmul_grad_workspace_size : nf4_matmul_workspace_size)(&tensor, &args,
                                                                                   bytes);
  }
  bool untouched() const {
    return x.untouched() && y.untouched() && product.untouched() && workspace.untouched();
  }
};

const std::vector<Function<Call>> &Call::functions() {
  static const std::vector<Function<Call>> list = {
      {"nf4_matmul_cpu", kMultiply | kCpu, [](Call &c) { return c.run(false); }},
      {"nf4_matmul_launch", kMultiply | kLaunch, [](Call &c) { return c.run(true); }},
      {"nf4_matmul_grad_cpu", kGradient | kCpu, [](Call &c) { return c.run(false); }},
      {"nf4_matmul_grad_launch", kGradient | kLaunch, [](Call &c) { return c.run(true); }},
  };
  return list;
}

const std::vector<Fault<Call>> kFaults = {
    {kGradient, [](Call &c) { c.args.bias = c.x.data(); },
     "bias is not NULL; expected NULL in the gradient"},
    {kGradient, [](Call &c) { c.args.x_stride = kRows - 1; }, "x_stride is 5; expected at least 6"},
    {kGradient, [](Call &c) { c.args.y_stride = kCols - 1; },
     "y_stride is 95; expected at least 96"},
    {kAll, [](Call &c) { c.args.y = c.x.data(); }, "x overlaps y"},
    {kAll, [](Call &c) { c.args.y = nullptr; }, "y is NULL"},
    {kAll, [](Call &c) { c.args.struct_size = 63; },
     "nf4_matmul_args.struct_size is 63; this library knows 72"},
    {kAll, [](Call &c) { c.lora.struct_size = 0; },
     "nf4_lora.struct_size is 0; this library knows 64"},
    {kAll, [](Call &c) { c.lora.dtype = NF4_DTYPE_FP16; },
     "lora.dtype is 2; expected 1 (fp32) or that of the nf4_matmul_args, 3"},
    {kAll, [](Call &c) { c.lora.dtype = 0; },
     "lora.dtype is 0; expected 1 (fp32) or that of the nf4_matmul_args, 3"},
    {kAll, [](Call &c) { c.lora.rank = 0; }, "lora.rank is 0; expected 1 to 128"},
    {kAll, [](Call &c) { c.lora.rank = 129; }, "lora.rank is 129; expected 1 to 128"},
    {kAll, [](Call &c) { c.lora.scale = INFINITY; }, "lora.scale is inf; expected a finite number"},
    {kAll, [](Call &c) { c.lora.scale = NAN; }, "lora.scale is nan; expected a finite number"},
    {kAll, [](Call &c) { c.lora.reserved = 1; }, "lora.reserved is 1; expected 0"},
    {kAll, [](Call &c) { c.lora.a_stride = kCols - 1; },
     "lora.a_stride is 95; expected at least 96"},
    {kAll, [](Call &c) { c.lora.b_stride = kRank - 1; }, "lora.b_stride is 3; expected at least 4"},
    {kAll, [](Call &c) { c.lora.a_stride = INT64_MAX; },
     "rank * lora.a_stride is 4 * 9223372036854775807; expected at most 2^60"},
    {kAll, [](Call &c) { c.lora.b_stride = INT64_MAX; },
     "rows * lora.b_stride is 6 * 9223372036854775807; expected at most 2^60"},
    {kAll, [](Call &c) { c.args.m = (int64_t{1} << 53) + 1; },
     "m is 9007199254740993; expected at most 2^53 with a lora"},
    {kAll,
     [](Call &c) {
       c.tensor.rows = (int64_t{1} << 53) + 1;
       (c.gradient ? c.args.x_stride : c.args.y_stride) = c.tensor.rows;
     },
     "rows is 9007199254740993; expected at most 2^53 with a lora"},
    {kAll,
     [](Call &c) {
       c.tensor.cols = (int64_t{1} << 53) + 1;
       c.lora.a_stride = (c.gradient ? c.args.y_stride : c.args.x_stride) = c.tensor.cols;
     },
     "cols is 9007199254740993; expected at most 2^53 with a lora"},
    {kAll, [](Call &c) { c.lora.a = nullptr; }, "lora.a is NULL"},
    {kAll, [](Call &c) { c.lora.b = nullptr; }, "lora.b is NULL"},
    {kCpu, [](Call &c) { c.lora.product = nullptr; }, "lora.product is NULL"},
    {kAll, [](Call &c) { c.lora.product = c.y.data(); }, "lora.product overlaps y"},
    {kAll, [](Call &c) { c.lora.product = c.x.data(); }, "x overlaps lora.product"},
    {kAll, [](Call &c) { c.lora.a = c.y.data(); }, "lora.a overlaps y"},
    {kAll, [](Call &c) { c.lora.b = c.product.data(); }, "lora.b overlaps lora.product"},
    {kLaunch, [](Call &c) { c.workspace_bytes = 0; }, "workspace_bytes is 0; expected at least "},
    {kLaunch, [](Call &c) { c.lora.product = c.workspace.data(); },
     "workspace overlaps lora.product"},
};

}  // namespace

TEST_CASE("a bad argument of the gradient or an adapter is named, and nothing is written",
          "[api]") {
  check_faults(kFaults);
}

TEST_CASE("the calls that the table breaks are right", "[api]") {
  for (const int work : {kMultiply, kGradient}) {
    Call call(work);
    CHECK(call.run(false) == NF4_STATUS_OK);
    CHECK(!call.y.untouched());
    CHECK(!call.product.untouched());
  }
}

TEST_CASE("an adapter's workspace does not depend on its dtype", "[api]") {
  for (const int work : {kMultiply, kGradient})
    for (const int rank : {16, 64, 128}) {
      Call call(work);
      call.tensor.rows = 128;
      call.tensor.cols = 8192;
      call.lora.rank = rank;
      call.lora.a_stride = call.args.x_stride = call.args.y_stride = 8192;
      call.lora.b_stride = rank;
      size_t bytes[2] = {};
      for (const nf4_dtype dtype : {NF4_DTYPE_BF16, NF4_DTYPE_FP32}) {
        call.lora.dtype = dtype;
        REQUIRE(call.workspace_size(&bytes[dtype == NF4_DTYPE_FP32]) == NF4_STATUS_OK);
      }
      CHECK(bytes[0] > 0);
      CHECK(bytes[0] == bytes[1]);
    }
}

TEST_CASE("args of the size before lora was appended are valid, and have none", "[api]") {
  constexpr size_t kBefore = 64;
  for (const int work : {kMultiply, kGradient}) {
    Call call(work);
    std::memset(call.x.data(), 0, call.x.size());
    std::memset(call.absmax.data(), 0, call.absmax.size());
    call.args.lora = reinterpret_cast<const nf4_lora *>(uintptr_t{1});
    call.args.struct_size = kBefore;
    size_t bytes = 1;
    CHECK(call.workspace_size(&bytes) == NF4_STATUS_OK);
    CHECK(bytes == 0);
    CHECK(call.run(false) == NF4_STATUS_OK);
    CHECK(call.product.untouched());
    // The elements of a batch are so many bytes apart.
    if (call.gradient) continue;
    uint8_t both[2 * kBefore];
    Call second(kMultiply);
    second.args.struct_size = kBefore;
    std::memcpy(both, &call.args, kBefore);
    std::memcpy(both + kBefore, &second.args, kBefore);
    const nf4_tensor *const weights[] = {&call.tensor, &second.tensor};
    CHECK(nf4_matmul_batch_cpu(weights, reinterpret_cast<nf4_matmul_args *>(both), 2, 1) ==
          NF4_STATUS_OK);
    CHECK(!second.y.untouched());
  }
}

TEST_CASE("an adapter needs workspace, the more the larger m and the rank", "[api]") {
  for (const int work : {kMultiply, kGradient}) {
    size_t before = 0;
    for (const int32_t rank : {1, 16, 17, 128})
      for (const int64_t m : {1, 2, 64, 1000}) {
        Call call(work);
        call.lora.rank = rank;
        call.lora.b_stride = rank;
        call.lora.a = call.lora.b = nullptr;  // not read
        size_t bytes[2];
        for (const bool more : {false, true}) {
          call.args.m = m + more;
          REQUIRE(call.workspace_size(&bytes[more]) == NF4_STATUS_OK);
        }
        CHECK(bytes[0] >= static_cast<size_t>(m * rank * 2));
        CHECK(bytes[1] >= bytes[0]);
        if (m == 1000) {
          CHECK(bytes[0] >= before);
          before = bytes[0];
        }
      }
  }
}

TEST_CASE("integer weights refuse an adapter by name", "[api]") {
  std::vector<uint16_t> memory(4096);
  nf4_int4_tensor weight{};
  weight.struct_size = sizeof weight;
  weight.layout = NF4_INT4_GPTQ;
  weight.scales_dtype = NF4_DTYPE_FP16;
  weight.group_size = 32;
  weight.rows = 8;
  weight.cols = 32;
  weight.packed = memory.data();
  weight.scales = memory.data() + 64;
  const nf4_lora lora{};
  const nf4_matmul_args args{sizeof args, NF4_DTYPE_FP16,      0, 1,    memory.data() + 128, 32,
                             nullptr,     memory.data() + 256, 8, &lora};
  CHECK(nf4_int4_matmul_cpu(&weight, &args, 1) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(std::string(nf4_last_error()) == "lora is not NULL; expected NULL for an nf4_int4_tensor");
}
