#include "support/placed.hpp"

#include <algorithm>
#include <cstring>

namespace nf4::test {

GuardedBuffer random_buffer(Rng &rng, size_t bytes, int alignment) {
  const Edge edge = rng.one_in(2) ? Edge::kStart : Edge::kEnd;
  const int64_t slack = rng.one_in(2) ? 0 : rng.below(64 / alignment) * alignment;
  // Against the end, the size decides the alignment.
  const int64_t excess = edge == Edge::kEnd ? (bytes + slack) % alignment : 0;
  return GuardedBuffer(bytes, edge, slack + (excess == 0 ? 0 : alignment - excess));
}

PlacedWeight::PlacedWeight(Rng &rng, const HostWeight &weight) : weight_(weight) {
  std::array<void *, kPartCount> addresses{};
  for (int part = 0; part < kPartCount; ++part) {
    buffer_of_[part] = static_cast<int>(buffers_.size());
    if (!weight.has(Part(part))) continue;
    buffers_.push_back(
        random_buffer(rng, weight.bytes[part].size(), part_alignment(Part(part), weight.nested())));
    addresses[part] = buffers_.back().data();
  }
  tensor_ = weight.at(addresses);
  reset();
}

const uint8_t *PlacedWeight::data(Part part) const { return buffers_[buffer_of_[part]].data(); }

void PlacedWeight::reset() {
  for (int part = 0; part < kPartCount; ++part) {
    if (!weight_.has(Part(part))) continue;
    const GuardedBuffer &buffer = buffers_[buffer_of_[part]];
    std::memcpy(buffer.data(), weight_.bytes[part].data(), buffer.size());
  }
}

bool PlacedWeight::surroundings_intact() const {
  return std::all_of(buffers_.begin(), buffers_.end(),
                     [](const GuardedBuffer &buffer) { return buffer.surroundings_intact(); });
}

bool PlacedWeight::unchanged(Part part) const {
  const auto &bytes = weight_.bytes[part];
  return bytes.empty() || std::memcmp(bytes.data(), data(part), bytes.size()) == 0;
}

}  // namespace nf4::test
