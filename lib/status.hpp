// Statuses, and the detail of the thread's last error.
#pragma once

#include "nf4/nf4.h"

namespace nf4 {

// Records the detail (printf style) for nf4_last_error() and returns `status`.
[[gnu::format(printf, 2, 3)]] nf4_status fail(nf4_status status, const char *format, ...);

// Prepends the number of the product in its batch to the detail just recorded.
nf4_status of_product(nf4_status status, int product);

}  // namespace nf4
