// Buffers between pages that cannot be touched: reading or writing one byte outside causes a fault,
// or is found as changed poison.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nf4::test {

// The guard page against which the data lies.
enum class Edge { kStart, kEnd };

class GuardedBuffer {
 public:
  // `bytes` of poison, `slack` bytes away from the guard page at `edge`. With slack 0 at
  // the end, the byte after the last one faults.
  GuardedBuffer(size_t bytes, Edge edge, size_t slack);
  GuardedBuffer(GuardedBuffer &&other) noexcept;
  GuardedBuffer(const GuardedBuffer &) = delete;
  GuardedBuffer &operator=(const GuardedBuffer &) = delete;
  ~GuardedBuffer();

  uint8_t *data() const { return data_; }
  size_t size() const { return bytes_; }

  // Fills data and surroundings with poison again.
  void poison();
  // Tells whether all accessible bytes around the data are still poison.
  bool surroundings_intact() const;
  // Tells whether the data bytes are still poison, too.
  bool untouched() const;

 private:
  uint8_t *pages_;  // the accessible ones
  size_t page_bytes_;
  uint8_t *data_;
  size_t bytes_;
};

}  // namespace nf4::test
