// Threads that are kept from call to call; they sleep if there is no call for a while.
#pragma once

#include <cstdint>

namespace nf4::cpu {

constexpr int kMaxThreads = 256;

// The threads of one call besides its own. Each calls work(context, i), for an i from 1 to count,
// unless it has not begun when the caller is done; `work` must allow others to do its part. If the
// system refuses to start threads, there are fewer.
class Workers {
 public:
  using Work = void (*)(void *context, int i);

  Workers(int count, Work work, void *context);
  // Waits for the threads that have begun.
  ~Workers();
  Workers(const Workers &) = delete;
  Workers &operator=(const Workers &) = delete;

 private:
  int16_t slots_[kMaxThreads - 1];
  int count_ = 0;
};

}  // namespace nf4::cpu
