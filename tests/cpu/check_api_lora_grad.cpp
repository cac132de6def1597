// The arguments of the gradients of an adapter's matrices.
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/catch.hpp"
#include "support/faults.hpp"
#include "support/guarded.hpp"

using namespace nf4::test;

namespace {

constexpr int64_t kM = 3, kRows = 6, kCols = 96;
constexpr int32_t kRank = 4;

// A right call, to be made wrong.
struct Call {
  GuardedBuffer x{kM * kCols * 4, Edge::kStart, 0};
  GuardedBuffer dy{kM * kRows * 4, Edge::kStart, 0};
  GuardedBuffer p{kM * kRank * 4, Edge::kStart, 0};
  GuardedBuffer q{kM * kRank * 4, Edge::kStart, 0};
  GuardedBuffer da{kRank * kCols * 4, Edge::kStart, 0};
  GuardedBuffer db{kRows * kRank * 4, Edge::kStart, 0};
  nf4_lora_grad_args args{sizeof args, NF4_DTYPE_BF16, NF4_DTYPE_FP32, kRank, 0.5f,      kM,
                          kRows,       kCols,          x.data(),       kCols, dy.data(), kRows,
                          p.data(),    q.data(),       da.data(),      kCols, db.data(), kRank};
  const nf4_lora_grad_args *address = &args;
  int32_t threads = 1;

  static constexpr int kForms[] = {kAll};
  static const std::vector<Function<Call>> &functions();

  explicit Call(int = kAll) {}
  nf4_status run(bool launch) const {
    return launch ? nf4_lora_grad_launch(address, nullptr) : nf4_lora_grad_cpu(address, threads);
  }
  bool untouched() const {
    for (const GuardedBuffer *buffer : {&x, &dy, &p, &q, &da, &db})
      if (!buffer->untouched()) return false;
    return true;
  }
};

const std::vector<Function<Call>> &Call::functions() {
  static const std::vector<Function<Call>> list = {
      {"nf4_lora_grad_cpu", kCpu, [](Call &c) { return c.run(false); }},
      {"nf4_lora_grad_launch", kLaunch, [](Call &c) { return c.run(true); }},
  };
  return list;
}

const std::string kHuge = std::to_string(INT64_MAX);

const std::vector<Fault<Call>> kFaults = {
    {kCpu, [](Call &c) { c.threads = -1; }, "threads is -1; expected 0 or more"},
    {kAll, [](Call &c) { c.address = nullptr; }, "the nf4_lora_grad_args is NULL"},
    {kAll, [](Call &c) { c.args.struct_size = 120; },
     "nf4_lora_grad_args.struct_size is 120; this library knows 128"},
    {kAll, [](Call &c) { c.args.dtype = 0; },
     "dtype is 0; expected 1 (fp32), 2 (fp16) or 3 (bf16)"},
    {kAll, [](Call &c) { c.args.grad_dtype = NF4_DTYPE_FP16; },
     "grad_dtype is 2; expected 1 (fp32) or the dtype, 3"},
    {kAll, [](Call &c) { c.args.grad_dtype = 0; },
     "grad_dtype is 0; expected 1 (fp32) or the dtype, 3"},
    {kAll, [](Call &c) { c.args.rank = 0; }, "rank is 0; expected 1 to 128"},
    {kAll, [](Call &c) { c.args.rank = 129; }, "rank is 129; expected 1 to 128"},
    {kAll, [](Call &c) { c.args.scale = INFINITY; }, "scale is inf; expected a finite number"},
    {kAll, [](Call &c) { c.args.scale = NAN; }, "scale is nan; expected a finite number"},
    {kAll, [](Call &c) { c.args.m = -1; }, "m is -1; expected 0 or more"},
    {kAll, [](Call &c) { c.args.rows = -1; }, "rows is -1; expected 0 or more"},
    {kAll, [](Call &c) { c.args.cols = -1; }, "cols is -1; expected 0 or more"},
    {kAll, [](Call &c) { c.args.x_stride = kCols - 1; }, "x_stride is 95; expected at least 96"},
    {kAll, [](Call &c) { c.args.dy_stride = kRows - 1; }, "dy_stride is 5; expected at least 6"},
    {kAll, [](Call &c) { c.args.da_stride = kCols - 1; }, "da_stride is 95; expected at least 96"},
    {kAll, [](Call &c) { c.args.db_stride = kRank - 1; }, "db_stride is 3; expected at least 4"},
    {kAll, [](Call &c) { c.args.x_stride = INT64_MAX; },
     "m * x_stride is 3 * " + kHuge + "; expected at most 2^60"},
    {kAll, [](Call &c) { c.args.dy_stride = INT64_MAX; },
     "m * dy_stride is 3 * " + kHuge + "; expected at most 2^60"},
    {kAll, [](Call &c) { c.args.da_stride = INT64_MAX; },
     "rank * da_stride is 4 * " + kHuge + "; expected at most 2^60"},
    {kAll, [](Call &c) { c.args.db_stride = INT64_MAX; },
     "rows * db_stride is 6 * " + kHuge + "; expected at most 2^60"},
    {kAll,
     [](Call &c) {
       c.args.m = (int64_t{1} << 58) + 1;
       c.args.cols = c.args.x_stride = 1;
     },
     "m * rank is 288230376151711745 * 4; expected at most 2^60"},
    {kAll,
     [](Call &c) {
       c.args.m = (int64_t{1} << 58) + 1;
       c.args.da = nullptr;
       c.args.rows = c.args.dy_stride = 1;
     },
     "m * rank is 288230376151711745 * 4; expected at most 2^60"},
    {kAll, [](Call &c) { c.args.x = nullptr; }, "x is NULL"},
    {kAll, [](Call &c) { c.args.dy = nullptr; }, "dy is NULL"},
    {kAll, [](Call &c) { c.args.p = nullptr; }, "p is NULL"},
    {kAll, [](Call &c) { c.args.q = nullptr; }, "q is NULL"},
    {kAll, [](Call &c) { c.args.x = c.x.data() + 1; }, "x is 0x"},
    {kAll, [](Call &c) { c.args.dy = c.dy.data() + 1; }, "dy is 0x"},
    {kAll, [](Call &c) { c.args.p = c.p.data() + 1; }, "p is 0x"},
    {kAll, [](Call &c) { c.args.q = c.q.data() + 1; }, "q is 0x"},
    {kAll, [](Call &c) { c.args.da = c.da.data() + 2; }, "da is 0x"},
    {kAll, [](Call &c) { c.args.db = c.db.data() + 2; }, "db is 0x"},
    {kAll, [](Call &c) { c.args.db = c.da.data(); }, "da overlaps db"},
    {kAll, [](Call &c) { c.args.da = c.x.data(); }, "x overlaps da"},
    {kAll, [](Call &c) { c.args.da = c.p.data(); }, "p overlaps da"},
    {kAll, [](Call &c) { c.args.db = c.dy.data(); }, "dy overlaps db"},
    {kAll, [](Call &c) { c.args.db = c.q.data(); }, "q overlaps db"},
    {kAll,
     [](Call &c) {
       c.args.da = nullptr;
       c.args.db = c.dy.data();
     },
     "dy overlaps db"},
    {kAll,
     [](Call &c) {
       c.args.m = 0;
       c.args.db = c.da.data();
     },
     "da overlaps db"},
};

}  // namespace

TEST_CASE("a bad argument of an adapter's gradients is named, and nothing is written", "[api]") {
  check_faults(kFaults);
}

TEST_CASE("the call of an adapter's gradients that the table breaks is right", "[api]") {
  const Call call;
  CHECK(call.run(false) == NF4_STATUS_OK);
  CHECK(!call.da.untouched());
  CHECK(!call.db.untouched());
}

// Also x and dy the same memory, as p and q.
TEST_CASE("what an adapter's gradients read may overlap", "[api]") {
  Call call;
  call.args.dy = call.x.data();
  call.args.q = call.p.data();
  CHECK(call.run(false) == NF4_STATUS_OK);
}

TEST_CASE("without a gradient that is wanted nothing is done, on a GPU either", "[api]") {
  for (const bool launch : {false, true})
    for (const bool empty : {false, true}) {
      Call call;
      call.args.x = call.args.dy = call.args.p = call.args.q = nullptr;
      call.args.x_stride = call.args.dy_stride = -1;
      if (empty) call.args.rows = call.args.cols = 0;
      if (!empty) call.args.da = call.args.db = nullptr;
      for (const int64_t m : {call.args.m, int64_t{1} << 56, std::numeric_limits<int64_t>::max()}) {
        call.args.m = m;
        CHECK(call.run(launch) == NF4_STATUS_OK);
        CHECK(call.untouched());
      }
    }
}
