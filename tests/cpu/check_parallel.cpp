// The library's threads: how they share a range, and what they leave to the program. [native]: not
// under ThreadSanitizer, which cannot start threads in a child of fork().
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/parallel.hpp"
#include "support/catch.hpp"
#include "support/threads.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

// Whether a thread that is moved has the time to end meanwhile.
std::atomic<bool> slow_moves{false};
std::atomic<int> moves{0};

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

// Whether it is so in a child of this process.
template <class Condition>
bool in_child(Condition condition) {
  const pid_t child = fork();
  if (child == 0) _exit(condition() ? 0 : 1);
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

// No thread has room for it, so none can be made.
constexpr size_t kEndlessStack = size_t{1} << 62;

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
    const auto deadline = std::chrono::steady_clock::now() + kHang;
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
