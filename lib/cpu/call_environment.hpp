// The state of the calling thread that a call on the CPU changes for its duration.
#pragma once

#include <pthread.h>

#include <cfenv>

namespace nf4::cpu {

// Kernels promise exact bits, so they run in the default floating-point environment, whatever the
// caller's is (flush-to-zero, for example). Threads that are started within it inherit it. A
// cancellation waits until the call is over: unwinding would leave threads behind that still work
// on the caller's stack.
class CallEnvironment {
 public:
  CallEnvironment() {
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state_);
    std::fegetenv(&floats_);
    std::fesetenv(FE_DFL_ENV);
  }
  // Throws if an asynchronous cancellation has waited: the thread is unwound from here.
  ~CallEnvironment() noexcept(false) {
    std::fesetenv(&floats_);
    pthread_setcancelstate(cancel_state_, nullptr);
  }
  CallEnvironment(const CallEnvironment &) = delete;
  CallEnvironment &operator=(const CallEnvironment &) = delete;

 private:
  std::fenv_t floats_;
  int cancel_state_;
};

}  // namespace nf4::cpu
