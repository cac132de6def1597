#include "support/guarded.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>

namespace nf4::test {
namespace {

constexpr uint8_t kPoison = 0xa5;

size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

bool is_poison(const uint8_t *begin, const uint8_t *end) {
  if (begin == end) return true;
  // The first byte is poison and every byte equals the one before it; memcmp is fast.
  return *begin == kPoison && std::memcmp(begin, begin + 1, end - begin - 1) == 0;
}

}  // namespace

GuardedBuffer::GuardedBuffer(size_t bytes, Edge edge, size_t slack) : bytes_(bytes) {
  const size_t page = page_size();
  page_bytes_ = std::max(page, (bytes + slack + page - 1) / page * page);
  void *mapping =
      mmap(nullptr, page_bytes_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  pages_ = static_cast<uint8_t *>(mapping) + page;
  if (mprotect(pages_, page_bytes_, PROT_READ | PROT_WRITE) != 0)
    throw std::system_error(errno, std::generic_category(), "mprotect");
  data_ = edge == Edge::kStart ? pages_ + slack : pages_ + page_bytes_ - slack - bytes;
  poison();
}

GuardedBuffer::GuardedBuffer(GuardedBuffer &&other) noexcept
    : pages_(other.pages_),
      page_bytes_(other.page_bytes_),
      data_(other.data_),
      bytes_(other.bytes_) {
  other.pages_ = nullptr;
}

GuardedBuffer::~GuardedBuffer() {
  if (pages_ != nullptr) munmap(pages_ - page_size(), page_bytes_ + 2 * page_size());
}

void GuardedBuffer::poison() { std::memset(pages_, kPoison, page_bytes_); }

bool GuardedBuffer::surroundings_intact() const {
  return is_poison(pages_, data_) && is_poison(data_ + bytes_, pages_ + page_bytes_);
}

bool GuardedBuffer::untouched() const { return is_poison(pages_, pages_ + page_bytes_); }

}  // namespace nf4::test
