// Bytes of a fuzzer as numbers and pointers. Each takes as many bytes whatever it is, so that a
// changed byte changes one argument; bytes that are 0, or missing, are the arguments of a correct
// call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nf4::fuzz {

// Products of sizes that are too large for 64 bits.
__extension__ using Wide = __int128;

class Input {
 public:
  Input(const uint8_t *data, size_t size) : data_(data), size_(size) {}

  uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  int below(int n) { return byte() % n; }
  bool rarely() { return byte() >= 240; }

  // Mostly `usual`; else what is near it, a limit, or a power of two, or its negative, and what is
  // near that.
  int64_t number(int64_t usual) {
    const uint8_t kind = byte(), power = byte();
    const auto offset = static_cast<int8_t>(byte());
    if (kind < kFirstStep) return usual;
    if (kind < kFirstLimit) return sum(usual, kSteps[kind - kFirstStep]);
    if (kind < kFirstPower) return kLimits[kind - kFirstLimit];
    const uint64_t power_of_two = uint64_t{1} << (power & 63);
    return sum(static_cast<int64_t>((power & 0x80) != 0 ? -power_of_two : power_of_two),
               offset / 16);
  }
  int32_t number32(int32_t usual) { return static_cast<int32_t>(number(usual)); }

 private:
  // That wraps.
  static int64_t sum(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }

  static constexpr int64_t kSteps[] = {1, -1, 2, -2, 7, -7, 8, -8, 32, 64, 128, 1000};
  static constexpr int64_t kLimits[] = {0,
                                        1,
                                        -1,
                                        INT32_MAX,
                                        INT32_MIN,
                                        int64_t{1} << 32,
                                        int64_t{1} << 53,
                                        int64_t{1} << 60,
                                        (int64_t{1} << 60) + 1,
                                        INT64_MAX - 4,
                                        INT64_MAX,
                                        INT64_MIN};
  static constexpr int kFirstStep = 200, kFirstLimit = kFirstStep + 12,
                       kFirstPower = kFirstLimit + 12;

  const uint8_t *data_;
  size_t size_;
  size_t at_ = 0;
};

// The memory of a call. A part has exactly the bytes that it should, from the heap, so that
// AddressSanitizer sees what is read or written outside; one that is too large has an address that
// is not to be touched.
class Memory {
 public:
  explicit Memory(Input &input) : input_(input) {}
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;

  // `bytes` of arbitrary data; now and then NULL, misaligned, or a part of an earlier one.
  void *part(Wide bytes, int alignment);
  template <class T>
  T *array(Wide count) {
    return static_cast<T *>(part(count * static_cast<Wide>(sizeof(T)), alignof(T)));
  }

  // May all parts be read and written?
  bool real() const { return real_; }
  // Is no part NULL, misaligned or in another?
  bool usual() const { return usual_; }
  void set_unusual() { usual_ = false; }
  // From here on writes are seen.
  void watch();
  bool untouched() const;

 private:
  struct Block {
    uint8_t *data;
    size_t bytes;
    int offset;
  };

  void *too_large(Wide bytes, int alignment);
  void *inside(size_t bytes, int alignment);

  Input &input_;
  std::vector<Block> blocks_;
  std::vector<uint8_t> before_;  // what was in the first of them
  size_t watched_ = 0;
  uint64_t next_address_ = uint64_t{1} << 48;  // beyond the heap
  bool real_ = true, usual_ = true;
};

}  // namespace nf4::fuzz
