// Calls that share their work with the library's threads, or that many threads make. [native]: not
// under ThreadSanitizer, which needs more stack.
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <pthread.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "cpu/reference.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/force.hpp"
#include "support/matmul_cases.hpp"
#include "support/placed.hpp"
#include "support/threads.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kCallers = 64;

struct Quantized {
  PlacedWeight weight;
  nf4_status status;
};

Quantized quantize(const QuantizeCase &test, int threads) {
  Rng rng(1);
  Quantized result{PlacedWeight(rng, test.weight), 0};
  const GuardedBuffer workspace = random_buffer(rng, test.workspace_bytes, 16);
  result.status = nf4_quantize_cpu(test.in.data(), test.dtype, &result.weight.tensor(),
                                   workspace.data(), test.workspace_bytes, threads);
  return result;
}

bool same_parts(const HostWeight &host, const PlacedWeight &a, const PlacedWeight &b) {
  for (const Part part : {kPacked, kAbsmax, kNestedAbsmax, kNestedOffset})
    if (host.has(part) &&
        first_difference(a.data(part), b.data(part),
                         static_cast<int64_t>(host.bytes[part].size())) != kNoDifference)
      return false;
  return true;
}

// Weights large enough to be split over several threads, with a partial last block.
QuantizeCase large_case(Rng &rng, int blocksize, bool nested) {
  const CaseClass kind{kDtypes[rng.below(3)], blocksize, nested};
  return random_quantize_case(rng, kind, CodebookKind::kNf4, 2500000 + rng.between(1, 5000));
}

// A thread that was cancelled before its calls begin, so that any that acted on it would.
struct CancelledCalls {
  const QuantizeCase &test;
  const PlacedWeight &weight;
  std::vector<uint8_t> out;
  std::vector<nf4_status> statuses;

  static void *run(void *opaque) {
    auto &calls = *static_cast<CancelledCalls *>(opaque);
    pthread_cancel(pthread_self());
    calls.statuses.push_back(
        nf4_dequant_cpu(&calls.weight.tensor(), calls.out.data(), calls.test.dtype, 3));
    calls.statuses.push_back(quantize(calls.test, 3).status);
    pthread_testcancel();
    calls.statuses.clear();
    return nullptr;
  }
};

}  // namespace

TEST_CASE("a cancelled thread goes on until its call is over", "[threads]") {
  Rng rng(15);
  const QuantizeCase test = large_case(rng, 64, true);
  const Quantized expected = quantize(test, 1);
  CancelledCalls calls{test, expected.weight, std::vector<uint8_t>(test.in.size()), {}};
  std::vector<uint8_t> reference(test.in.size());
  nf4_dequant_cpu(&expected.weight.tensor(), reference.data(), test.dtype, 1);
  pthread_t thread;
  REQUIRE(pthread_create(&thread, nullptr, CancelledCalls::run, &calls) == 0);
  void *result;
  REQUIRE(pthread_join(thread, &result) == 0);
  CHECK(result == PTHREAD_CANCELED);
  CHECK(calls.statuses == std::vector<nf4_status>(2, NF4_STATUS_OK));
  CHECK(calls.out == reference);
}

TEST_CASE("the number of threads changes no bit", "[threads]") {
  Rng rng(11);
  for (const int blocksize : {32, 64, 4096}) {
    for (const bool nested : {false, true}) {
      const QuantizeCase test = large_case(rng, blocksize, nested);
      INFO(describe(test.weight, test.dtype, 11));
      const Quantized expected = [&] {
        const ForcedVariant forced(scalar_variant());
        return quantize(test, 1);
      }();
      const size_t out_bytes = test.in.size();
      const GuardedBuffer reference = random_buffer(rng, out_bytes, dtype_bytes(test.dtype));
      {
        const ForcedVariant forced(scalar_variant());
        nf4_dequant_cpu(&expected.weight.tensor(), reference.data(), test.dtype, 1);
      }
      for (const int threads : kThreadCounts) {
        INFO("threads " << threads);
        const Quantized got = quantize(test, threads);
        CHECK(got.status == NF4_STATUS_OK);
        CHECK(same_parts(test.weight, got.weight, expected.weight));
        CHECK(got.weight.surroundings_intact());
        const GuardedBuffer out = random_buffer(rng, out_bytes, dtype_bytes(test.dtype));
        CHECK(nf4_dequant_cpu(&got.weight.tensor(), out.data(), test.dtype, threads) ==
              NF4_STATUS_OK);
        CHECK(first_difference(test.dtype, out.data(), reference.data(), test.weight.elements()) ==
              kNoDifference);
        CHECK(out.surroundings_intact());
      }
    }
  }
}

TEST_CASE("64 threads may call at once", "[threads]") {
  Rng rng(12);
  const QuantizeCase test =
      random_quantize_case(rng, {NF4_DTYPE_BF16, 64, true}, CodebookKind::kNf4, 200001);
  const Quantized expected = quantize(test, 1);
  std::vector<uint8_t> reference(test.in.size());
  nf4_dequant_cpu(&expected.weight.tensor(), reference.data(), test.dtype, 1);

  std::vector<std::string> faults(kCallers);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      // Half of them also fail, each in its own words.
      const nf4_dtype bad_dtype = 1000 + caller;
      std::vector<uint8_t> out(test.in.size());
      if (caller % 2 == 0) nf4_dequant_cpu(&expected.weight.tensor(), out.data(), bad_dtype, 1);
      const Quantized got = quantize(test, 1 + caller % 3);
      nf4_dequant_cpu(&got.weight.tensor(), out.data(), test.dtype, 1 + caller % 2);
      if (!same_parts(test.weight, got.weight, expected.weight)) faults[caller] = "quantize";
      if (first_difference(test.dtype, out.data(), reference.data(), test.weight.elements()) !=
          kNoDifference)
        faults[caller] = "dequantize";
      const std::string error = nf4_last_error();
      const bool told = error.find(std::to_string(bad_dtype)) != std::string::npos;
      if (caller % 2 == 0 ? !told : !error.empty()) faults[caller] = "last error: " + error;
    });
  }
  for (std::thread &caller : callers) caller.join();
  for (const std::string &fault : faults) CHECK(fault == "");
}

TEST_CASE("threads have the stack that they need, whatever the default is", "[threads][native]") {
  constexpr int kThreads = 3;
  const DefaultStack small(sysconf(_SC_THREAD_STACK_MIN));
  REQUIRE(threads_meet(kThreads));
  Rng rng(16);
  for (const cpu::Variant &variant : cpu::variants()) {
    if (!variant.supported()) continue;
    INFO("variant " << variant.name);
    const ForcedVariant forced(variant);
    const QuantizeCase dense = large_case(rng, 4096, true);
    const Quantized expected = quantize(dense, 1), got = quantize(dense, kThreads);
    CHECK(got.status == NF4_STATUS_OK);
    CHECK(same_parts(dense.weight, got.weight, expected.weight));
    for (const nf4_dtype dtype : kDtypes)
      for (const int64_t m : {1, 20}) {
        // Worth several threads, and little work for the scalar variant.
        const MatmulShape shape{m == 1 ? 600 : 60, 8192, m};
        const MatmulCase test = random_matmul_case(rng, {dtype, 32, true}, CodebookKind::kSorted,
                                                   shape, XKind::kOrdinary);
        INFO(describe(test, 16));
        const PlacedWeight weight(rng, test.weight);
        const auto multiply = [&](int threads) {
          std::vector<uint8_t> y(test.y_bytes());
          const nf4_matmul_args args =
              test.args(test.x.data(), test.bias.empty() ? nullptr : test.bias.data(), y.data());
          CHECK(nf4_matmul_cpu(&weight.tensor(), &args, threads) == NF4_STATUS_OK);
          return y;
        };
        const bool same = multiply(kThreads) == multiply(1);
        CHECK(same);
      }
  }
}

#if defined(__SSE2__)
TEST_CASE("the caller's floating-point environment changes no bit and comes back", "[threads]") {
  constexpr unsigned kFlushAndRoundDown = 0x8040 | 0x2000;
  Rng rng(13);
  for (const bool nested : {false, true}) {
    const QuantizeCase test = large_case(rng, 64, nested);
    const Quantized expected = quantize(test, 1);
    for (const cpu::Variant &variant : cpu::variants()) {
      if (!variant.supported()) continue;
      INFO("variant " << variant.name);
      const ForcedVariant forced(variant);
      const unsigned saved = _mm_getcsr();
      _mm_setcsr(saved | kFlushAndRoundDown);
      const Quantized got = quantize(test, 3);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(saved);
      CHECK((after & kFlushAndRoundDown) == kFlushAndRoundDown);
      CHECK(same_parts(test.weight, got.weight, expected.weight));
    }
  }
}
#endif
