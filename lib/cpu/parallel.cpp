// Work stealing: a range is split into one share for each thread (workers.hpp).
#include "cpu/parallel.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "cpu/quota.hpp"
#include "cpu/workers.hpp"

namespace nf4::cpu {
namespace {

// A chunk is this fraction of the rest of a share,
constexpr int64_t kChunks = 6;
// and at least this fraction of the work that is worth a thread.
constexpr int64_t kSmallestPart = 4;

// A range, split into one share for each thread. A thread takes chunks of its own share first,
// which keeps what it writes in its own caches from call to call; then it steals from the others.
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

}  // namespace

int available_processors() {
  // The quota is read once, since reading it takes longer than a small call.
  static std::atomic<int> kept_quota{0};
  int quota = kept_quota.load(std::memory_order_relaxed);
  if (quota == 0) {
    quota = processors_of_quota("");
    kept_quota.store(quota, std::memory_order_relaxed);
  }
  cpu_set_t set;
  const bool known = sched_getaffinity(0, sizeof set, &set) == 0;
  const int processors = known ? CPU_COUNT(&set) : std::thread::hardware_concurrency();
  return std::max(1, std::min(processors, quota));
}

void detail::run_chunks(int64_t count, int64_t per_thread, int threads, Chunk chunk,
                        const void *body) {
  if (count == 0) return;
  const int64_t worth = (count + per_thread - 1) / per_thread;
  const int together =
      static_cast<int>(std::min<int64_t>({threads_of(threads), worth, kMaxThreads}));
  if (together == 1) return chunk(body, 0, count);

  Range range(count, std::max<int64_t>(1, per_thread / kSmallestPart), together, chunk, body);
  const auto work = [](void *range, int thread) { static_cast<Range *>(range)->work(thread); };
  const Workers workers(together - 1, work, &range);
  range.work(0);
}

}  // namespace nf4::cpu
