// The threads that the library starts, and those that call it. [native]: not under ThreadSanitizer,
// which needs more stack and cannot start threads in a child of fork().
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/parallel.hpp"
#include "cpu/reference.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/force.hpp"
#include "support/matmul_cases.hpp"
#include "support/placed.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr int kThreadCounts[] = {1, 2, 3, 7, 300, 0};
constexpr int kCallers = 64;
// Far more than a loaded machine takes for what would otherwise wait forever.
constexpr std::chrono::seconds kDeadline{60};

// Whether a thread that is moved has the time to end meanwhile.
std::atomic<bool> slow_moves{false};
std::atomic<int> moves{0};

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

struct Coverage {
  int64_t wrong_visits;  // indices that were not visited once
  int64_t threads;       // that visited any
};

Coverage cover(int64_t count, int64_t per_thread, int threads) {
  std::vector<std::atomic<int>> visits(count);
  std::set<std::thread::id> visitors;
  std::mutex mutex;
  cpu::parallel_for(count, per_thread, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++visits[i];
    const std::lock_guard<std::mutex> lock(mutex);
    visitors.insert(std::this_thread::get_id());
  });
  Coverage coverage{0, static_cast<int64_t>(visitors.size())};
  for (const auto &visit : visits) coverage.wrong_visits += visit != 1;
  return coverage;
}

// Whether so many threads run at the same time: each waits for the others.
bool threads_meet(int threads) {
  std::atomic<int> here{0};
  std::atomic<bool> in_time{true};
  cpu::parallel_for(threads, 1, threads, [&](int64_t, int64_t) {
    ++here;
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    while (here < threads && in_time) {
      if (std::chrono::steady_clock::now() >= deadline) in_time = false;
      std::this_thread::yield();
    }
  });
  return in_time;
}

// Whether it is so in a child of this process.
template <class Condition>
bool in_child(Condition condition) {
  const pid_t child = fork();
  if (child == 0) _exit(condition() ? 0 : 1);
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

// For its lifetime threads are made with this stack by default.
class DefaultStack {
 public:
  explicit DefaultStack(size_t bytes) {
    REQUIRE(pthread_getattr_default_np(&before_) == 0);
    pthread_attr_t attributes;
    REQUIRE(pthread_attr_init(&attributes) == 0);
    REQUIRE(pthread_attr_setstacksize(&attributes, bytes) == 0);
    REQUIRE(pthread_setattr_default_np(&attributes) == 0);
    pthread_attr_destroy(&attributes);
  }
  ~DefaultStack() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  DefaultStack(const DefaultStack &) = delete;
  DefaultStack &operator=(const DefaultStack &) = delete;

 private:
  pthread_attr_t before_;
};

// No thread has room for it, so none can be made.
constexpr size_t kEndlessStack = size_t{1} << 62;

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

// Stands before the system's, which it calls.
extern "C" int pthread_setaffinity_np(pthread_t thread, size_t bytes,
                                      const cpu_set_t *set) noexcept {
  static const auto systems = reinterpret_cast<decltype(&pthread_setaffinity_np)>(
      dlsym(RTLD_NEXT, "pthread_setaffinity_np"));
  ++moves;
  if (slow_moves) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return systems(thread, bytes, set);
}

TEST_CASE("parallel_for covers a range once, on no more threads than it may", "[threads]") {
  for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{64}, int64_t{1000}}) {
    for (const int64_t per_thread : {int64_t{1}, int64_t{8}, int64_t{5000}}) {
      for (const int threads : kThreadCounts) {
        INFO("count " << count << ", per thread " << per_thread << ", threads " << threads);
        const Coverage coverage = cover(count, per_thread, threads);
        CHECK(coverage.wrong_visits == 0);
        CHECK(coverage.threads <= (count + per_thread - 1) / per_thread);
        if (threads > 0) CHECK(coverage.threads <= threads);
      }
    }
  }
}

TEST_CASE("a thread that is late delays its own chunk alone", "[threads]") {
  // The first chunk ends only when all others are done, which other threads must do.
  constexpr int64_t kCount = 1000;
  std::atomic<int64_t> done{0};
  std::atomic<bool> in_time{true};
  cpu::parallel_for(kCount, 1, 2, [&](int64_t begin, int64_t end) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    while (begin == 0 && done < kCount - end && in_time) {
      in_time = std::chrono::steady_clock::now() < deadline;
      std::this_thread::yield();
    }
    done += end - begin;
  });
  CHECK(in_time);
  CHECK(done == kCount);
}

TEST_CASE("the caller may run where it could before", "[threads]") {
  // A thread that ends while it is moved could be taken for the caller.
  const auto processors = [] {
    cpu_set_t set;
    REQUIRE(sched_getaffinity(0, sizeof set, &set) == 0);
    return set;
  };
  const cpu_set_t before = processors();
  if (CPU_COUNT(&before) == 1) {
    WARN("one processor: it is the only one whatever moves where");
    return;
  }
  moves = 0;
  slow_moves = true;
  for (int call = 0; call < 20; ++call)
    cpu::parallel_for(50, 1, 50, [](int64_t, int64_t) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    });
  slow_moves = false;
  const cpu_set_t after = processors();
  CHECK(CPU_EQUAL(&before, &after));
  CHECK(moves > 0);
}

TEST_CASE("where the system refuses threads the caller does their work", "[threads]") {
  const DefaultStack refused(kEndlessStack);
  REQUIRE_THROWS_AS(std::thread([] {}), std::system_error);
  // In a child, which has no threads that were kept.
  CHECK(in_child([] {
    const Coverage coverage = cover(1000, 1, 7);
    return coverage.wrong_visits == 0 && coverage.threads == 1;
  }));
}

TEST_CASE("threads are kept for the next call", "[threads]") {
  const auto other_thread = [] {
    std::atomic<int> here{0}, other{0};
    cpu::parallel_for(2, 1, 2, [&](int64_t, int64_t) {
      if (gettid() != getpid()) other = gettid();
      for (++here; here < 2;) std::this_thread::yield();
    });
    return other.load();
  };
  const int first = other_thread();
  CHECK(other_thread() == first);
  // Long enough for it to fall asleep.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(other_thread() == first);
}

TEST_CASE("threads leave all signals to the program's own but those of their faults", "[threads]") {
  sigset_t blocked;
  sigemptyset(&blocked);
  std::atomic<int> here{0};
  cpu::parallel_for(2, 1, 2, [&](int64_t, int64_t) {
    if (gettid() != getpid()) pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    for (++here; here < 2;) std::this_thread::yield();
  });
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGCHLD, SIGPROF})
    CHECK(sigismember(&blocked, signal) == 1);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP})
    CHECK(sigismember(&blocked, fault) == 0);
}

TEST_CASE("a child of fork() has threads of its own, also one of a thread",
          "[threads][native][fork]") {
  REQUIRE(threads_meet(3));
  CHECK(in_child([] { return threads_meet(3) && cover(1000, 1, 7).wrong_visits == 0; }));
  std::thread([] { CHECK(in_child([] { return threads_meet(3); })); }).join();
  // Of one that forks while another calls.
  std::atomic<bool> forked{false};
  std::thread caller([&] {
    while (!forked) cover(1000, 1, 3);
  });
  for (int i = 0; i < 20; ++i) CHECK(in_child([] { return threads_meet(3); }));
  forked = true;
  caller.join();
  CHECK(threads_meet(3));
}

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
        const MatmulCase test = random_matmul_case(rng, {dtype, 32, true}, CodebookKind::kSorted,
                                                   {600, 8192, m}, XKind::kOrdinary);
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
