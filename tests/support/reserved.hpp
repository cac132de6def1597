// Address space that costs memory only where it is touched.
#pragma once

#include <sys/mman.h>

#include <cstddef>

#include "support/catch.hpp"

namespace nf4::test {

class Reserved {
 public:
  explicit Reserved(size_t bytes)
      : bytes_(bytes),
        address_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    REQUIRE(address_ != MAP_FAILED);
  }
  ~Reserved() { munmap(address_, bytes_); }
  Reserved(const Reserved &) = delete;
  Reserved &operator=(const Reserved &) = delete;
  template <class T>
  T *as() const {
    return static_cast<T *>(address_);
  }

 private:
  size_t bytes_;
  void *address_;
};

}  // namespace nf4::test
