#include <cstdlib>
#include <cstring>
#include <random>

#include "input.hpp"

namespace nf4::fuzz {
namespace {

constexpr size_t kMostBytes = size_t{1} << 18;  // of a part
constexpr size_t kNoiseBytes = size_t{1} << 16;

// The contents of memory at first.
const uint8_t *noise() {
  static const std::vector<uint32_t> words = [] {
    std::mt19937 engine(1);
    std::vector<uint32_t> result(kNoiseBytes / 4);
    for (uint32_t &word : result) word = static_cast<uint32_t>(engine());
    return result;
  }();
  return reinterpret_cast<const uint8_t *>(words.data());
}

void fill(uint8_t *data, size_t bytes, size_t start) {
  for (size_t done = 0; done < bytes;) {
    const size_t from = (start + done) % kNoiseBytes;
    const size_t count = std::min(bytes - done, kNoiseBytes - from);
    std::memcpy(data + done, noise() + from, count);
    done += count;
  }
}

}  // namespace

Memory::~Memory() {
  for (const Block &block : blocks_) std::free(block.data - block.offset);
}

void *Memory::part(Wide bytes, int alignment) {
  const uint8_t kind = input_.byte(), start = input_.byte();
  if (kind >= 250) {
    usual_ = false;
    return nullptr;
  }
  if (bytes < 0) bytes = 0;
  if (bytes > static_cast<Wide>(kMostBytes)) return too_large(bytes, alignment);
  const auto size = static_cast<size_t>(bytes);
  if (kind >= 240)
    if (void *const shared = inside(size, alignment)) return shared;
  const int offset = kind >= 230 && kind < 240 ? 1 : 0;
  if (offset != 0 && alignment > 1) usual_ = false;
  auto *const data = static_cast<uint8_t *>(std::malloc(size + offset)) + offset;
  blocks_.push_back({data, size, offset});
  fill(data, size, size_t{start} * 251);
  return data;
}

void *Memory::too_large(Wide bytes, int alignment) {
  real_ = false;
  const Wide end = static_cast<Wide>(next_address_) + bytes + alignment;
  if (end >= (static_cast<Wide>(1) << 64)) {
    usual_ = false;
    return reinterpret_cast<void *>(next_address_);
  }
  const uint64_t address = next_address_;
  next_address_ = (static_cast<uint64_t>(end) + 255) & ~uint64_t{255};
  return reinterpret_cast<void *>(address);
}

void *Memory::inside(size_t bytes, int alignment) {
  for (const Block &block : blocks_)
    if (bytes > 0 && block.bytes >= bytes) {
      usual_ = false;
      const size_t room = (block.bytes - bytes) / alignment;
      return block.data + std::min<size_t>(room, 1) * alignment;
    }
  return nullptr;
}

void Memory::watch() {
  before_.clear();
  watched_ = blocks_.size();
  for (const Block &block : blocks_)
    before_.insert(before_.end(), block.data, block.data + block.bytes);
}

bool Memory::untouched() const {
  size_t at = 0;
  for (size_t i = 0; i < watched_; ++i) {
    const Block &block = blocks_[i];
    if (block.bytes > 0 && std::memcmp(block.data, before_.data() + at, block.bytes) != 0)
      return false;
    at += block.bytes;
  }
  return true;
}

}  // namespace nf4::fuzz
