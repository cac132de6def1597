// Threads that are kept from call to call, asleep if there is none for a while.
#pragma once

#include <cstdint>

namespace nf4::cpu {

constexpr int kMaxThreads = 256;

// The threads of one call beside its own. Each calls work(context, i), for an i from 1 to count,
// unless it has not begun when the caller is done: the work is such that others will have done its
// part. Where the system refuses a thread, there are fewer.
class Workers {
 public:
  using Work = void (*)(void *context, int i);

  Workers(int count, Work work, void *context);
  // Waits for those that have begun.
  ~Workers();
  Workers(const Workers &) = delete;
  Workers &operator=(const Workers &) = delete;

 private:
  int16_t slots_[kMaxThreads - 1];
  int count_ = 0;
};

}  // namespace nf4::cpu
