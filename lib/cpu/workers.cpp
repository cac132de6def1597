// A pool of threads. Each has a slot, which is all that a caller shares with it. Slots are taken
// from a list for the duration of a call, so callers on several threads have threads of their own.
// Nothing is allocated, and nothing is destroyed when the process exits; a child of fork() has none
// of the threads and begins with empty slots. docs/design/cpu.md has the figures.
//
// An idle thread spins for a while, as the next call of a model is often near, yields to others
// meanwhile, and then sleeps. The system places threads, except in two cases that would delay a
// call. A thread that is woken may wait on its waker's processor until that one sleeps, so it is
// kept off the caller's processor. A thread may also wait behind a spinning thread of the caller's,
// such as OpenMP's after their work: a call does not wait for a thread that has not begun, and a
// thread with a chunk and no processor gets the caller's.
#include "cpu/workers.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <thread>
#include <type_traits>

// These are ThreadSanitizer's, if the program has it. It does not see the order that the library's
// atomics create, as the library is not compiled for it.
extern "C" {
[[gnu::weak]] void __tsan_acquire(void *);
[[gnu::weak]] void __tsan_release(void *);
}

namespace nf4::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// The stack of a thread; kernels use up to 160 KiB of it. `ulimit -s` or the program may have made
// the default smaller.
constexpr size_t kStackBytes = size_t{256} << 10;
constexpr std::chrono::microseconds kSpin{1000};
constexpr int kPausesOfYield = 16;
// A thread that is still busy this long after all others most likely has a chunk and no processor:
// the last chunks of a vector variant take a tenth of it. If the thread does have a processor, as
// with the scalar variant, it loses its caches and little else.
constexpr std::chrono::microseconds kPatience{100};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // yield returns at once
#endif
}

// The processors on which the caller may run, and those without its current one, if there are
// others.
struct Processors {
  cpu_set_t callers;
  cpu_set_t others;

  Processors() {
    if (sched_getaffinity(0, sizeof callers, &callers) != 0) CPU_ZERO(&callers);
    others = callers;
    if (CPU_COUNT(&others) > 1) CPU_CLR(sched_getcpu(), &others);
  }
};

// A thread and its work.
class Slot {
 public:
  // Called by callers that have taken the slot.
  bool start() {
    if (started_) return true;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    size_t bytes = 0;
    pthread_attr_getstacksize(&attributes, &bytes);
    if (bytes < kStackBytes) pthread_attr_setstacksize(&attributes, kStackBytes);
    // The thread handles no signals of the process. It does handle those of its own faults: if they
    // were blocked, they would end the process whatever its handlers.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    started_ = pthread_create(&thread_, &attributes, run, this) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    CPU_ZERO(&processors_);
    CPU_ZERO(&callers_);
    return started_;
  }

  // Keeps the thread off the caller's processor if it must be woken. A spinning thread has a
  // processor and stays there; otherwise a caller that migrates would move all of them before they
  // work.
  void keep_off(const Processors &processors) {
    const bool asleep = state_.load(std::memory_order_relaxed) == kAsleep;
    if (!asleep && CPU_EQUAL(&processors.callers, &callers_)) return;
    move(processors.others);
    callers_ = processors.callers;
  }

  // This is a hint: if the system refuses it, the thread only starts later.
  void move(const cpu_set_t &processors) {
    CPU_ZERO(&callers_);
    if (CPU_EQUAL(&processors, &processors_)) return;
    processors_ = processors;
    pthread_setaffinity_np(thread_, sizeof processors, &processors);
  }

  void submit(Workers::Work work, void *context, int number) {
    work_ = work;
    context_ = context;
    number_ = number;
    release();
    if (state_.exchange(kSubmitted) == kAsleep) wake();
  }

  // Returns false if the thread has begun.
  bool cancel() {
    State submitted = kSubmitted;
    return state_.compare_exchange_strong(submitted, kIdle);
  }

  bool working() {
    if (state_.load(std::memory_order_acquire) == kWorking) return true;
    acquire();
    return false;
  }

  void wait() {
    State working = kWorking;
    if (state_.compare_exchange_strong(working, kAwaited))
      while (state_.load(std::memory_order_acquire) == kAwaited) sleep(kAwaited);
    acquire();
  }

  void join() {
    if (state_.exchange(kStopping) == kAsleep) wake();
    pthread_join(thread_, nullptr);
    new (this) Slot();
  }

 private:
  enum State : uint32_t { kIdle, kAsleep, kSubmitted, kWorking, kAwaited, kStopping };

  static void *run(void *opaque) {
    Slot &slot = *static_cast<Slot *>(opaque);
    while (slot.next()) {
      slot.acquire();
      slot.work_(slot.context_, slot.number_);
      slot.release();
      if (slot.state_.exchange(kIdle) == kAwaited) slot.wake();
    }
    return nullptr;
  }

  // Waits until there is work; returns false if there will be none.
  bool next() {
    auto spins_until = Clock::now() + kSpin;
    for (;;) {
      State state = state_.load(std::memory_order_acquire);
      if (state == kStopping) return false;
      if (state == kSubmitted && state_.compare_exchange_strong(state, kWorking)) return true;
      if (state != kIdle && state != kAsleep) continue;
      if (Clock::now() < spins_until) {
        for (int i = 0; i < kPausesOfYield && state_.load(std::memory_order_relaxed) == state; ++i)
          pause();
        sched_yield();
      } else if (state == kAsleep || state_.compare_exchange_strong(state, kAsleep)) {
        sleep(kAsleep);
      }
    }
  }

  void sleep(State state) {
    syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, state, nullptr, nullptr, 0);
  }
  void wake() { syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

  void acquire() {
    if (__tsan_acquire) __tsan_acquire(this);
  }
  void release() {
    if (__tsan_release) __tsan_release(this);
  }

  std::atomic<State> state_{kIdle};
  bool started_ = false;
  int number_ = 0;
  Workers::Work work_ = nullptr;
  void *context_ = nullptr;
  pthread_t thread_{};
  cpu_set_t processors_{};  // the processors of the thread
  cpu_set_t callers_{};     // the processors of the caller that kept it off its own; none if it was
                            // moved since
};

class Pool {
 public:
  constexpr Pool() = default;

  // Takes `count` slots with threads, or as many as there are.
  int take(int count, int16_t *slots) {
    static const bool prepared = pthread_atfork(nullptr, nullptr, begin_anew) == 0;
    if (!prepared) return 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    int taken = 0;
    for (; taken < count && free_count_ > 0; ++taken) slots[taken] = free_[--free_count_];
    for (int i = 0; taken < count && i < kMaxThreads - 1; ++i) {
      if (used_[i]) continue;
      if (!slots_[i].start()) break;
      used_[i] = true;
      slots[taken++] = static_cast<int16_t>(i);
    }
    return taken;
  }

  // Ends threads beyond the number of the machine's processors.
  void release(const int16_t *slots, int count) {
    static const int kept =
        std::clamp(static_cast<int>(std::thread::hardware_concurrency()) - 1, 1, kMaxThreads - 1);
    for (int i = count - 1; i >= 0; --i) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (free_count_ < kept) {
          free_[free_count_++] = slots[i];
          continue;
        }
      }
      slots_[slots[i]].join();
      const std::lock_guard<std::mutex> lock(mutex_);
      used_[slots[i]] = false;
    }
  }

  Slot &operator[](int slot) { return slots_[slot]; }

 private:
  static void begin_anew();

  std::mutex mutex_;
  int free_count_ = 0;
  int16_t free_[kMaxThreads - 1] = {};  // slots with threads that no call uses
  bool used_[kMaxThreads - 1] = {};     // slots with threads
  Slot slots_[kMaxThreads - 1];
};

// It exists before any constructor runs and is never destroyed, as threads may call while the
// process exits.
Pool pool;
static_assert(std::is_trivially_destructible_v<Pool>);

void Pool::begin_anew() { new (&pool) Pool(); }

}  // namespace

Workers::Workers(int count, Work work, void *context) : count_(pool.take(count, slots_)) {
  const Processors processors;
  for (int i = 0; i < count_; ++i) {
    Slot &slot = pool[slots_[i]];
    slot.keep_off(processors);
    slot.submit(work, context, i + 1);
  }
}

Workers::~Workers() {
  const auto patience_ends = Clock::now() + kPatience;
  for (int i = 0; i < count_; ++i) {
    Slot &slot = pool[slots_[i]];
    if (slot.cancel()) continue;
    while (slot.working() && Clock::now() < patience_ends) pause();
    if (!slot.working()) continue;
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    slot.move(here);
    slot.wait();
  }
  pool.release(slots_, count_);
}

}  // namespace nf4::cpu
