// Outputs larger than the caches are produced in a small buffer and copied from there with
// nontemporal stores, which avoids reading the lines that they overwrite. Pages that the system has
// not provided yet are written through the caches, since they are zeroed there at the first touch.
// docs/design/cpu.md has the measurements.
#include "cpu/dequant/output.hpp"

#include <sys/mman.h>
#include <unistd.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "cpu/cache.hpp"

namespace nf4::cpu {
namespace {

// Returns false if the system has not provided the page of an address yet.
bool is_resident(const char *address) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident = 1;
  mincore(reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(address) / page * page), 1,
          &resident);
  return resident & 1;
}

}  // namespace

void DequantOutput::begin(int64_t first, int64_t last) {
  nontemporal_ = kernels_.store_nontemporal != nullptr &&
                 bytes_ > kCachesOfOutput * last_level_cache_bytes() &&
                 is_resident(out_ + (first + last) / 2);
}

void DequantOutput::store(const char *made, int64_t offset, int64_t bytes) const {
  char *to = out_ + offset;
  if (made == to) return;
  if (!nontemporal_) {
    std::memcpy(to, made, bytes);
    return;
  }
  const auto misaligned = reinterpret_cast<uintptr_t>(to) % kLineBytes;
  const int64_t head = std::min<int64_t>(bytes, misaligned == 0 ? 0 : kLineBytes - misaligned);
  const int64_t lines = (bytes - head) / kLineBytes;
  const int64_t whole_end = head + lines * kLineBytes;
  std::memcpy(to, made, head);
  kernels_.store_nontemporal(to + head, made + head, lines);
  std::memcpy(to + whole_end, made + whole_end, bytes - whole_end);
}

void DequantOutput::end() const {
#if defined(__SSE__)
  // Nontemporal stores are not ordered with other stores without a fence.
  if (nontemporal_) _mm_sfence();
#endif
}

}  // namespace nf4::cpu
