#include "status.hpp"

#include <pthread.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace nf4 {
namespace {

constexpr size_t kDetailBytes = 512;
char lost[] = "there was no memory for the text of the error";

void release(void *detail) {
  if (detail != lost) std::free(detail);
}

// The detail of each thread's last failure, allocated at its first failure. It is not thread_local:
// when a library was opened with dlopen, the C library allocates such memory at first use, and
// aborts the process if there is none. (Initial-exec storage, which exists from the start, is too
// scarce for the 8 KiB of the CUDA runtime, which would be in it too.) The library is linked with
// -z nodelete, so that release() still exists when a thread ends.
pthread_key_t key;
bool has_key = false;

[[gnu::constructor]] void create_key() { has_key = pthread_key_create(&key, release) == 0; }

// Returns NULL before any failure.
char *last_detail() { return has_key ? static_cast<char *>(pthread_getspecific(key)) : nullptr; }

// Returns the thread's buffer of kDetailBytes, or NULL if there is no memory for one.
char *detail_buffer() {
  char *detail = last_detail();
  if (!has_key || (detail != nullptr && detail != lost)) return detail;
  detail = static_cast<char *>(std::malloc(kDetailBytes));
  if (pthread_setspecific(key, detail != nullptr ? detail : lost) == 0) return detail;
  std::free(detail);
  return nullptr;
}

}  // namespace

nf4_status fail(nf4_status status, const char *format, ...) {
  char *const detail = detail_buffer();
  if (detail == nullptr) return status;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(detail, kDetailBytes, format, arguments);
  va_end(arguments);
  return status;
}

nf4_status of_product(nf4_status status, int product) {
  char detail[kDetailBytes];
  std::snprintf(detail, sizeof detail, "%s", nf4_last_error());
  return fail(status, "product %d: %s", product, detail);
}

}  // namespace nf4

extern "C" const char *nf4_last_error(void) {
  const char *const detail = nf4::last_detail();
  return detail != nullptr ? detail : "";
}

extern "C" const char *nf4_status_string(nf4_status status) {
  switch (status) {
    case NF4_STATUS_OK:
      return "NF4_STATUS_OK";
    case NF4_STATUS_INVALID_ARGUMENT:
      return "NF4_STATUS_INVALID_ARGUMENT";
    case NF4_STATUS_NO_CUDA:
      return "NF4_STATUS_NO_CUDA";
    case NF4_STATUS_NO_DEVICE:
      return "NF4_STATUS_NO_DEVICE";
    case NF4_STATUS_UNSUPPORTED_DEVICE:
      return "NF4_STATUS_UNSUPPORTED_DEVICE";
    case NF4_STATUS_CUDA_ERROR:
      return "NF4_STATUS_CUDA_ERROR";
  }
  return "unknown nf4_status";
}
