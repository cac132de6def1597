#include "support/compare.hpp"

#include <cstring>

namespace nf4::test {
namespace {

template <class Bits>
int64_t first_difference_of(const void *a, const void *b, int64_t elements, Bits infinity) {
  if (elements == 0 || std::memcmp(a, b, elements * sizeof(Bits)) == 0) return kNoDifference;
  const Bits sign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  for (int64_t i = 0; i < elements; ++i) {
    Bits x;
    Bits y;
    std::memcpy(&x, static_cast<const char *>(a) + i * sizeof(Bits), sizeof(Bits));
    std::memcpy(&y, static_cast<const char *>(b) + i * sizeof(Bits), sizeof(Bits));
    const auto is_nan = [&](Bits bits) { return static_cast<Bits>(bits & ~sign) > infinity; };
    if (x != y && !(is_nan(x) && is_nan(y))) return i;
  }
  return kNoDifference;
}

}  // namespace

int64_t first_difference(nf4_dtype dtype, const void *a, const void *b, int64_t elements) {
  if (dtype == NF4_DTYPE_FP32) return first_difference_of<uint32_t>(a, b, elements, 0x7f800000u);
  return first_difference_of<uint16_t>(a, b, elements, dtype == NF4_DTYPE_FP16 ? 0x7c00 : 0x7f80);
}

int64_t first_difference(const void *a, const void *b, int64_t bytes) {
  const auto *x = static_cast<const uint8_t *>(a);
  const auto *y = static_cast<const uint8_t *>(b);
  for (int64_t i = 0; i < bytes; ++i)
    if (x[i] != y[i]) return i;
  return kNoDifference;
}

}  // namespace nf4::test
