#include "status.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace nf4 {
namespace {

// A fixed buffer: reporting an error asks for no memory of its own.
thread_local char last_error[512] = "";

}  // namespace

nf4_status fail(nf4_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

nf4_status of_product(nf4_status status, int product) {
  char detail[sizeof last_error];
  std::memcpy(detail, last_error, sizeof detail);
  return fail(status, "product %d: %s", product, detail);
}

}  // namespace nf4

extern "C" const char *nf4_last_error(void) { return nf4::last_error; }

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
