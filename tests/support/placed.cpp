#include "support/placed.hpp"

#include <algorithm>
#include <cstring>

namespace nf4::test {

GuardedBuffer random_buffer(Rng &rng, size_t bytes, int alignment) {
  const Edge edge = rng.one_in(2) ? Edge::kStart : Edge::kEnd;
  const int64_t slack = rng.one_in(2) ? 0 : rng.below(64 / alignment) * alignment;
  // Against the end, the size determines the alignment.
  const int64_t excess = edge == Edge::kEnd ? (bytes + slack) % alignment : 0;
  return GuardedBuffer(bytes, edge, slack + (excess == 0 ? 0 : alignment - excess));
}

template <class Host>
PlacedWeightOf<Host>::PlacedWeightOf(Rng &rng, const Host &weight) : weight_(weight) {
  std::array<void *, Host::kParts> addresses{};
  for (int part = 0; part < Host::kParts; ++part) {
    buffer_of_[part] = static_cast<int>(buffers_.size());
    if (!weight.has(part)) continue;
    buffers_.push_back(random_buffer(rng, weight.bytes[part].size(), weight.alignment(part)));
    addresses[part] = buffers_.back().data();
  }
  tensor_ = weight.at(addresses);
  reset();
}

template <class Host>
void PlacedWeightOf<Host>::reset() {
  for (int part = 0; part < Host::kParts; ++part) {
    if (!weight_.has(part)) continue;
    const GuardedBuffer &buffer = buffers_[buffer_of_[part]];
    std::memcpy(buffer.data(), weight_.bytes[part].data(), buffer.size());
  }
}

template <class Host>
bool PlacedWeightOf<Host>::surroundings_intact() const {
  return std::all_of(buffers_.begin(), buffers_.end(),
                     [](const GuardedBuffer &buffer) { return buffer.surroundings_intact(); });
}

template <class Host>
bool PlacedWeightOf<Host>::unchanged(int part) const {
  const auto &bytes = weight_.bytes[part];
  return bytes.empty() || std::memcmp(bytes.data(), data(part), bytes.size()) == 0;
}

template class PlacedWeightOf<HostWeight>;
template class PlacedWeightOf<HostInt4Weight>;

}  // namespace nf4::test
