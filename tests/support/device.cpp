#include "support/device.hpp"

#include <algorithm>

#include "support/catch.hpp"

namespace nf4::test {
namespace {

constexpr uint8_t kPoison = 0xa5;

bool all_poison(const uint8_t *device, size_t bytes) {
  std::vector<uint8_t> host(bytes);
  if (bytes != 0) REQUIRE_CUDA(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost));
  return std::all_of(host.begin(), host.end(), [](uint8_t byte) { return byte == kPoison; });
}

}  // namespace

void require_cuda(cudaError_t error, const char *call) {
  INFO(call << ": " << cudaGetErrorString(error));
  REQUIRE(error == cudaSuccess);
}

void fill_bytes(void *address, uint8_t byte, size_t bytes) {
  REQUIRE_CUDA(cudaMemset(address, byte, bytes));
  REQUIRE_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
}

DeviceBuffer::DeviceBuffer(size_t bytes, size_t lead) : lead_(lead), bytes_(bytes) {
  if (lead + bytes == 0) return;
  REQUIRE_CUDA(cudaMalloc(&allocation_, lead + bytes));
  fill_bytes(allocation_, kPoison, lead + bytes);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer &&other) noexcept
    : allocation_(other.allocation_), lead_(other.lead_), bytes_(other.bytes_) {
  other.allocation_ = nullptr;
}

DeviceBuffer::~DeviceBuffer() { cudaFree(allocation_); }

// A copy of more than 64 KiB may return before its last bytes have arrived. The tests' streams wait
// neither for it nor for the operation that filled the memory before.
void DeviceBuffer::write(const void *source) {
  if (bytes_ == 0) return;
  REQUIRE_CUDA(cudaMemcpy(data(), source, bytes_, cudaMemcpyHostToDevice));
  REQUIRE_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
}

std::vector<uint8_t> DeviceBuffer::read() const {
  std::vector<uint8_t> host(bytes_);
  if (bytes_ != 0) REQUIRE_CUDA(cudaMemcpy(host.data(), data(), bytes_, cudaMemcpyDeviceToHost));
  return host;
}

bool DeviceBuffer::lead_intact() const { return all_poison(allocation_, lead_); }

bool DeviceBuffer::untouched() const { return all_poison(allocation_, lead_ + bytes_); }

size_t random_lead(Rng &rng, int alignment) {
  return rng.one_in(2) ? 0 : rng.below(64 / alignment) * alignment;
}

template <class Host>
DeviceWeightOf<Host>::DeviceWeightOf(Rng &rng, const Host &weight, bool aligned) {
  std::array<void *, Host::kParts> addresses{};
  for (int part = 0; part < Host::kParts; ++part) {
    buffer_of_[part] = static_cast<int>(buffers_.size());
    if (!weight.has(part)) continue;
    const size_t lead = aligned ? 0 : random_lead(rng, weight.alignment(part));
    buffers_.emplace_back(weight.bytes[part].size(), lead);
    buffers_.back().write(weight.bytes[part].data());
    addresses[part] = buffers_.back().data();
  }
  tensor_ = weight.at(addresses);
}

template <class Host>
bool DeviceWeightOf<Host>::leads_intact() const {
  return std::all_of(buffers_.begin(), buffers_.end(),
                     [](const DeviceBuffer &buffer) { return buffer.lead_intact(); });
}

template class DeviceWeightOf<HostWeight>;
template class DeviceWeightOf<HostInt4Weight>;

}  // namespace nf4::test
