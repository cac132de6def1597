// Checks the output of a launch: repeated many times from a graph, and while a predecessor still
// writes its inputs.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/kernels.hpp"

namespace nf4::test {

// Device memory of a launch, with its name in nf4.h. NULL or empty: the launch has none of that
// name.
struct DeviceBytes {
  const char *name;
  const void *address;
  size_t size;

  uint8_t *data() const { return static_cast<uint8_t *>(const_cast<void *>(address)); }
  bool empty() const { return address == nullptr || size == 0; }
};

inline DeviceBytes bytes_of(const char *name, const DeviceBuffer &buffer) {
  return {name, buffer.data(), buffer.size()};
}

inline std::vector<DeviceBytes> parts_of(const HostWeight &host, const nf4_tensor &tensor) {
  return {{"packed", tensor.packed, host.bytes[kPacked].size()},
          {"absmax", tensor.absmax, host.bytes[kAbsmax].size()},
          {"nested_absmax", tensor.nested_absmax, host.bytes[kNestedAbsmax].size()},
          {"nested_code", tensor.nested_code, host.bytes[kNestedCode].size()},
          {"nested_offset", tensor.nested_offset, host.bytes[kNestedOffset].size()},
          {"codebook", tensor.codebook, host.bytes[kCodebook].size()}};
}

inline std::vector<DeviceBytes> parts_of(const HostInt4Weight &host,
                                         const nf4_int4_tensor &tensor) {
  return {{"packed", tensor.packed, host.bytes[kInt4Packed].size()},
          {"scales", tensor.scales, host.bytes[kInt4Scales].size()},
          {"zeros", tensor.zeros, host.bytes[kInt4Zeros].size()},
          {"g_idx", tensor.g_idx, host.bytes[kInt4GIdx].size()},
          {"permutation", tensor.permutation, host.bytes[kInt4Permutation].size()}};
}

inline std::vector<std::vector<uint8_t>> read_all(const std::vector<DeviceBytes> &buffers) {
  std::vector<std::vector<uint8_t>> read;
  for (const DeviceBytes &buffer : buffers) {
    read.emplace_back(buffer.empty() ? 0 : buffer.size);
    if (!buffer.empty())
      REQUIRE_CUDA(
          cudaMemcpy(read.back().data(), buffer.address, buffer.size, cudaMemcpyDeviceToHost));
  }
  return read;
}

inline void poison_all(const std::vector<DeviceBytes> &buffers) {
  for (const DeviceBytes &buffer : buffers)
    if (!buffer.empty()) fill_bytes(buffer.data(), 0xa5, buffer.size);
}

// `launch` writes the same bytes once, and 100 times from a graph.
template <class Launch>
void check_replays(const std::vector<DeviceBytes> &outputs, const Stream &stream,
                   const Launch &launch) {
  REQUIRE(launch() == NF4_STATUS_OK);
  stream.synchronize();
  const std::vector<std::vector<uint8_t>> expected = read_all(outputs);
  cudaGraphExec_t graph = capture(stream, [&] { REQUIRE(launch() == NF4_STATUS_OK); });
  for (int replay = 0; replay < replays(); ++replay) {
    poison_all(outputs);
    REQUIRE_CUDA(cudaGraphLaunch(graph, stream));
    stream.synchronize();
    const bool same = read_all(outputs) == expected;
    REQUIRE(same);
  }
  REQUIRE_CUDA(cudaGraphExecDestroy(graph));
}

// `launch` writes the same bytes, whichever input a predecessor writes late after letting it start
// early.
template <class Launch>
void check_waits(const std::vector<DeviceBytes> &inputs, const std::vector<DeviceBytes> &outputs,
                 const Stream &stream, const Launch &launch) {
  constexpr long long kEnoughToStart = 2'000'000;  // in cycles
  REQUIRE(launch() == NF4_STATUS_OK);
  stream.synchronize();
  const std::vector<std::vector<uint8_t>> expected = read_all(outputs);
  for (const DeviceBytes &input : inputs) {
    if (input.empty()) continue;
    INFO(input.name << " comes late");
    const DeviceBuffer source(input.size);
    REQUIRE_CUDA(cudaMemcpy(source.data(), input.address, input.size, cudaMemcpyDeviceToDevice));
    fill_bytes(input.data(), 0, input.size);
    poison_all(outputs);
    REQUIRE_CUDA(cudaDeviceSynchronize());
    launch_late_copy(input.data(), source.data<uint8_t>(), input.size, kEnoughToStart, stream);
    REQUIRE(launch() == NF4_STATUS_OK);
    stream.synchronize();
    const bool same = read_all(outputs) == expected;
    CHECK(same);
  }
}

}  // namespace nf4::test
