// Helpers that tests of threads share.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "cpu/parallel.hpp"
#include "support/catch.hpp"

namespace nf4::test {

constexpr int kThreadCounts[] = {1, 2, 3, 7, 300, 0};
// Ends a wait that would otherwise last forever; no machine is so slow that it reaches this limit
// (tests/python/limits.py).
constexpr std::chrono::seconds kHang{3600};

// Tells whether this many threads run at the same time: each waits for the others.
inline bool threads_meet(int threads) {
  std::atomic<int> here{0};
  std::atomic<bool> in_time{true};
  cpu::parallel_for(threads, 1, threads, [&](int64_t, int64_t) {
    ++here;
    const auto deadline = std::chrono::steady_clock::now() + kHang;
    while (here < threads && in_time) {
      if (std::chrono::steady_clock::now() >= deadline) in_time = false;
      std::this_thread::yield();
    }
  });
  return in_time;
}

// During its lifetime, threads get this stack by default.
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

}  // namespace nf4::test
