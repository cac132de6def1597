// 64 threads that call for long, in no order: ./dev nightly. NF4_SOAK_CALLS: of each thread.
#include <cstdlib>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "nf4/nf4.h"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/matmul_cases.hpp"
#include "support/placed.hpp"
#include "support/proofs.hpp"

using namespace nf4::test;

namespace {

constexpr int kCallers = 64;
constexpr int kKinds = 4;

// The calls of all threads: one each to dequantize, quantize, multiply, and of a wrong argument.
// The large ones are shared with threads of the library.
class Calls {
 public:
  explicit Calls(int64_t elements, MatmulShape shape)
      : rng_(31),
        dense_(
            random_quantize_case(rng_, {NF4_DTYPE_BF16, 64, true}, CodebookKind::kNf4, elements)),
        product_(random_matmul_case(rng_, {NF4_DTYPE_FP16, 64, true}, CodebookKind::kSorted, shape,
                                    XKind::kOrdinary)),
        weight_(rng_, product_.weight) {
    for (int kind = 0; kind < kKinds; ++kind) expected_.push_back(run(kind, 0, 1));
  }

  // The result of the call, or its message; `caller` is in the message of the wrong one.
  std::string run(int kind, int caller, int threads) const {
    if (kind == 3) {
      nf4_dequant_cpu(&weight_.tensor(), nullptr, 1000 + caller, threads);
      return nf4_last_error();
    }
    std::string result;
    const auto out = [&](size_t bytes) {
      result.assign(bytes, '\0');
      return result.data();
    };
    nf4_status status = NF4_STATUS_OK;
    if (kind == 0) {
      const size_t bytes = product_.weight.elements() * 2;
      status = nf4_dequant_cpu(&weight_.tensor(), out(bytes), NF4_DTYPE_FP16, threads);
    } else if (kind == 1) {
      Rng rng(1);
      const PlacedWeight into(rng, dense_.weight);
      std::vector<uint64_t> workspace(dense_.workspace_bytes / 8 + 2);
      auto *const aligned = reinterpret_cast<uint8_t *>(
          (reinterpret_cast<uintptr_t>(workspace.data()) + 15) & ~15ull);
      status = nf4_quantize_cpu(dense_.in.data(), dense_.dtype, &into.tensor(), aligned,
                                dense_.workspace_bytes, threads);
      const size_t bytes = dense_.weight.bytes[kPacked].size();
      std::copy_n(into.data(kPacked), bytes, out(bytes));
    } else {
      const nf4_matmul_args args =
          product_.args(product_.x.data(), product_.bias.empty() ? nullptr : product_.bias.data(),
                        out(product_.y_bytes()));
      status = nf4_matmul_cpu(&weight_.tensor(), &args, threads);
    }
    return status == NF4_STATUS_OK ? result : nf4_status_string(status);
  }

  bool right(int kind, int caller, int threads) const {
    const std::string result = run(kind, caller, threads);
    if (kind != 3) return result == expected_[kind];
    return result.find(std::to_string(1000 + caller)) != std::string::npos;
  }

 private:
  Rng rng_;
  QuantizeCase dense_;
  MatmulCase product_;
  PlacedWeight weight_;
  std::vector<std::string> expected_;
};

}  // namespace

TEST_CASE("64 threads call for long", "[.soak]") {
  const char *const text = std::getenv("NF4_SOAK_CALLS");
  const int64_t calls = text != nullptr ? std::stoll(text) : 10000;
  REQUIRE(calls > 0);
  const Calls small(1000, {16, 128, 2}), large(2500001, {4096, 2048, 1});
  std::vector<int64_t> wrong(kCallers);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller)
    callers.emplace_back([&, caller] {
      Rng rng(caller);
      for (int64_t i = 0; i < calls; ++i) {
        const Calls &which = rng.one_in(300) ? large : small;
        const auto kind = static_cast<int>(rng.below(kKinds));
        wrong[caller] += !which.right(kind, caller, static_cast<int>(1 + rng.below(3)));
      }
    });
  for (std::thread &caller : callers) caller.join();
  proved("soak", kCallers * calls, std::accumulate(wrong.begin(), wrong.end(), int64_t{0}));
  for (const int64_t each : wrong) CHECK(each == 0);
}
