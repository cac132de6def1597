// Buffers between pages that cannot be touched: one byte read or written outside faults,
// or is found as changed poison.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nf4::test {

// Which guard page the data lies against.
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
  // Are all accessible bytes around the data still poison?
  bool surroundings_intact() const;
  // Are the data bytes still poison too?
  bool untouched() const;

 private:
  uint8_t *pages_;  // the accessible ones
  size_t page_bytes_;
  uint8_t *data_;
  size_t bytes_;
};

}  // namespace nf4::test
