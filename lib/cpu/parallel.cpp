// Work stealing over threads that are made for the call. The system places threads, but for two
// cases in which one of them would hold up the call (docs/design/cpu.md has the figures):
// - A thread may be started on its maker's processor, and wait there until that one sleeps or the
//   load is balanced. So threads that do not run yet are moved to other processors.
// - It may wait behind a thread of the caller's that spins, as OpenMP's do for milliseconds after
//   their work. So the caller, when it has nothing left to do, takes it to its own processor.
#include "cpu/parallel.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace nf4::cpu {
namespace {

constexpr int kMaxThreads = 256;
// The stack of a thread, of which kernels use up to 190 KiB. `ulimit -s` or the program may have
// made the default smaller.
constexpr size_t kStackBytes = size_t{256} << 10;
// A chunk is this part of what is left of a share,
constexpr int64_t kChunks = 8;
// and at least this part of what is worth a thread.
constexpr int64_t kSmallestPart = 16;
// A thread that is still busy so long after all others most likely has a chunk and no processor:
// the last chunks of a vector variant take a tenth of it. One that does have a processor, as the
// scalar variant's may, loses its caches and little else.
constexpr std::chrono::microseconds kPatience{100};

// A range in one share for each thread. A thread takes chunks of its own share first, which keeps
// what it writes in its own caches from call to call, then steals from the others'.
class Range {
 public:
  Range(int64_t count, int64_t smallest, int threads, detail::Chunk chunk, const void *body)
      : count_(count), smallest_(smallest), threads_(threads), chunk_(chunk), body_(body) {
    for (int i = 0; i < threads; ++i) next_[i].store(share_begin(i), std::memory_order_relaxed);
  }

  // Takes chunks until none is left.
  void work(int thread) {
    for (int i = 0; i < threads_; ++i) work_on_share((thread + i) % threads_);
  }

 private:
  int64_t share_begin(int share) const {
    return count_ / threads_ * share + count_ % threads_ * share / threads_;
  }

  void work_on_share(int share) {
    const int64_t share_end = share_begin(share + 1);
    std::atomic<int64_t> &next = next_[share];
    int64_t begin = next.load(std::memory_order_relaxed);
    while (begin < share_end) {
      const int64_t left = share_end - begin;
      const int64_t end = begin + std::min(left, std::max(smallest_, left / kChunks));
      if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      chunk_(body_, begin, end);
      begin = next.load(std::memory_order_relaxed);
    }
  }

  const int64_t count_;
  const int64_t smallest_;
  const int threads_;
  const detail::Chunk chunk_;
  const void *const body_;
  std::atomic<int64_t> next_[kMaxThreads];
};

// A thread's attributes: the process's defaults, but with at least the stack that kernels need.
class ThreadAttributes {
 public:
  ThreadAttributes() {
    pthread_attr_init(&attributes_);
    size_t bytes = 0;
    pthread_attr_getstacksize(&attributes_, &bytes);
    if (bytes < kStackBytes) pthread_attr_setstacksize(&attributes_, kStackBytes);
  }
  ~ThreadAttributes() { pthread_attr_destroy(&attributes_); }
  ThreadAttributes(const ThreadAttributes &) = delete;
  ThreadAttributes &operator=(const ThreadAttributes &) = delete;

  const pthread_attr_t *get() const { return &attributes_; }

 private:
  pthread_attr_t attributes_;
};

// A thread of one call. Not a std::thread, which allocates, throws, and takes the default stack.
class Worker {
 public:
  // Where the system refuses a thread, there is none.
  void start(Range &range, int number, const ThreadAttributes &attributes) {
    range_ = &range;
    number_ = number;
    started_ = pthread_create(&thread_, attributes.get(), run, this) == 0;
    if (!started_) state_.store(kDone, std::memory_order_relaxed);
  }

  bool waiting() const { return state_.load(std::memory_order_relaxed) == kWaiting; }
  bool done() const { return state_.load(std::memory_order_relaxed) == kDone; }

  // A hint: where the system refuses it, the thread only comes later. One that has exited has no
  // number any more and must not be moved: the system would move the caller.
  void move(const cpu_set_t &processors) {
    const std::lock_guard<std::mutex> lock(leaving_);
    if (!done()) pthread_setaffinity_np(thread_, sizeof processors, &processors);
  }

  void join() {
    if (started_) pthread_join(thread_, nullptr);
  }

 private:
  enum State { kWaiting, kWorking, kDone };

  static void *run(void *opaque) {
    Worker &worker = *static_cast<Worker *>(opaque);
    worker.state_.store(kWorking, std::memory_order_relaxed);
    worker.range_->work(worker.number_);
    const std::lock_guard<std::mutex> lock(worker.leaving_);
    worker.state_.store(kDone, std::memory_order_relaxed);
    return nullptr;
  }

  std::atomic<State> state_{kWaiting};
  std::mutex leaving_;
  pthread_t thread_;
  bool started_;
  int number_;
  Range *range_;
};

void move_off_this_processor(Worker *workers, int count) {
  cpu_set_t elsewhere;
  if (sched_getaffinity(0, sizeof elsewhere, &elsewhere) != 0) return;
  CPU_CLR(sched_getcpu(), &elsewhere);
  for (int i = 0; i < count; ++i)
    if (workers[i].waiting()) workers[i].move(elsewhere);
}

// When the caller has nothing left to do: takes the threads that have no processor to its own, one
// after the other, so that none of them waits there for another.
void finish(Worker *workers, int count) {
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(sched_getcpu(), &here);
  const auto patience_ends = std::chrono::steady_clock::now() + kPatience;
  for (int i = 0; i < count; ++i) {
    Worker &worker = workers[i];
    while (!worker.done() && !worker.waiting() && std::chrono::steady_clock::now() < patience_ends)
      sched_yield();
    worker.move(here);
    worker.join();
  }
}

}  // namespace

int available_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

void detail::run_chunks(int64_t count, int64_t per_thread, int threads, Chunk chunk,
                        const void *body) {
  if (count == 0) return;
  const int64_t worth = (count + per_thread - 1) / per_thread;
  const int together =
      static_cast<int>(std::min<int64_t>({threads_of(threads), worth, kMaxThreads}));
  if (together == 1) return chunk(body, 0, count);

  Range range(count, std::max<int64_t>(1, per_thread / kSmallestPart), together, chunk, body);
  Worker workers[kMaxThreads - 1];
  const ThreadAttributes attributes;
  for (int i = 1; i < together; ++i) workers[i - 1].start(range, i, attributes);
  move_off_this_processor(workers, together - 1);
  range.work(0);
  finish(workers, together - 1);
}

}  // namespace nf4::cpu
