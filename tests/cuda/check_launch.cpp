// How launches behave: streams, capture, devices, bad arguments, errors of others.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/device.hpp"
#include "support/kernels.hpp"

using namespace nf4;
using namespace nf4::test;

namespace {

constexpr CaseClass kKind{NF4_DTYPE_BF16, 64, true};
constexpr int64_t kElements = 100003;
constexpr long long kLongTime = 200'000'000;  // cycles: a tenth of a second or so

// A quantize followed by a dequantize of its result, all on the device.
struct RoundTrip {
  Rng rng{0x6000000};
  QuantizeCase test = random_quantize_case(rng, kKind, CodebookKind::kNf4, kElements);
  DeviceWeight weight{rng, test.weight};
  DeviceBuffer in{test.in.size()};
  DeviceBuffer workspace{test.workspace_bytes};
  DeviceBuffer out{test.in.size()};

  RoundTrip() { in.write(test.in.data()); }

  nf4_status quantize(cudaStream_t stream) const {
    return nf4_quantize_launch(in.data(), kKind.dtype, &weight.tensor(), workspace.data(),
                               workspace.size(), stream);
  }
  nf4_status dequantize(cudaStream_t stream) const {
    return nf4_dequant_launch(&weight.tensor(), out.data(), kKind.dtype, stream);
  }
  void run(cudaStream_t stream) const {
    REQUIRE(quantize(stream) == NF4_STATUS_OK);
    REQUIRE(dequantize(stream) == NF4_STATUS_OK);
  }
  void poison() const { fill_bytes(out.data(), 0xa5, out.size()); }
};

bool mentions(const char *word) {
  return std::string(nf4_last_error()).find(word) != std::string::npos;
}

}  // namespace

TEST_CASE("the same bits on any stream, run after run, and from a graph", "[cuda]") {
  const RoundTrip trip;
  const Stream stream;
  const Stream other;
  trip.run(stream);
  stream.synchronize();
  const std::vector<uint8_t> expected = trip.out.read();
  const auto check = [&](cudaStream_t used) {
    REQUIRE_CUDA(cudaStreamSynchronize(used));
    REQUIRE(same_bytes(trip.out.read(), expected));
    trip.poison();
  };
  trip.poison();
  trip.run(other);
  check(other);
  trip.run(nullptr);
  check(nullptr);
  trip.run(cudaStreamPerThread);
  check(cudaStreamPerThread);

  cudaGraphExec_t graph = capture(stream, [&] { trip.run(stream); });
  for (int replay = 0; replay < replays(); ++replay) {
    REQUIRE_CUDA(cudaGraphLaunch(graph, other));
    check(other);
  }
  REQUIRE_CUDA(cudaGraphExecDestroy(graph));
}

// The driver does not know it before the graph runs.
TEST_CASE("memory that a capture allocates", "[cuda]") {
  const RoundTrip trip;
  const Stream stream;
  trip.run(stream);
  stream.synchronize();
  const std::vector<uint8_t> expected = trip.out.read();
  trip.poison();
  cudaGraphExec_t graph = capture(stream, [&] {
    void *out = nullptr;
    REQUIRE_CUDA(cudaMallocAsync(&out, trip.out.size(), stream));
    CHECK(nf4_dequant_launch(&trip.weight.tensor(), out, kKind.dtype, stream) == NF4_STATUS_OK);
    REQUIRE_CUDA(
        cudaMemcpyAsync(trip.out.data(), out, trip.out.size(), cudaMemcpyDeviceToDevice, stream));
    REQUIRE_CUDA(cudaFreeAsync(out, stream));
  });
  REQUIRE_CUDA(cudaGraphLaunch(graph, stream));
  stream.synchronize();
  CHECK(same_bytes(trip.out.read(), expected));
  REQUIRE_CUDA(cudaGraphExecDestroy(graph));
}

TEST_CASE("a launch waits for what is before it on its stream, and does not block", "[cuda]") {
  const RoundTrip trip;
  const Stream stream;
  const std::vector<uint8_t> zeros(trip.in.size());
  trip.run(stream);  // loads the kernels
  stream.synchronize();
  launch_spin(kLongTime, stream);
  REQUIRE_CUDA(cudaMemsetAsync(trip.in.data(), 0, trip.in.size(), stream));
  trip.run(stream);
  CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
  stream.synchronize();
  CHECK(same_bytes(trip.out.read(), zeros));
}

// Launches may start while their predecessor runs, which this one invites them to.
TEST_CASE("launches wait for a predecessor that lets them start early", "[cuda]") {
  const RoundTrip trip;
  const Stream stream;
  trip.run(stream);
  stream.synchronize();
  const std::vector<uint8_t> expected = trip.out.read();
  const std::vector<uint8_t> packed = trip.weight.read(kPacked);
  auto *packed_address = static_cast<uint8_t *>(trip.weight.tensor().packed);
  const DeviceBuffer source(std::max(trip.in.size(), packed.size()));
  constexpr long long kEnoughToStart = 2'000'000;

  SECTION("quantize") {
    REQUIRE_CUDA(
        cudaMemcpy(source.data(), trip.test.in.data(), trip.in.size(), cudaMemcpyHostToDevice));
    fill_bytes(trip.in.data(), 0, trip.in.size());
    launch_late_copy(trip.in.data<uint8_t>(), source.data<uint8_t>(), trip.in.size(),
                     kEnoughToStart, stream);
    trip.run(stream);
  }
  SECTION("quantize with an 8-bit code that comes late") {
    const std::vector<uint8_t> code = trip.weight.read(kNestedCode);
    auto *code_address =
        reinterpret_cast<uint8_t *>(const_cast<float *>(trip.weight.tensor().nested_code));
    REQUIRE_CUDA(cudaMemcpy(source.data(), code.data(), code.size(), cudaMemcpyHostToDevice));
    fill_bytes(code_address, 0, code.size());
    launch_late_copy(code_address, source.data<uint8_t>(), code.size(), kEnoughToStart, stream);
    trip.run(stream);
  }
  SECTION("dequantize") {
    REQUIRE_CUDA(cudaMemcpy(source.data(), packed.data(), packed.size(), cudaMemcpyHostToDevice));
    fill_bytes(packed_address, 0, packed.size());
    trip.poison();
    launch_late_copy(packed_address, source.data<uint8_t>(), packed.size(), kEnoughToStart, stream);
    REQUIRE(trip.dequantize(stream) == NF4_STATUS_OK);
  }
  stream.synchronize();
  CHECK(same_bytes(trip.out.read(), expected));
}

TEST_CASE("launches from many threads", "[cuda]") {
  const RoundTrip trip;
  const Stream stream;
  trip.run(stream);
  stream.synchronize();
  const std::vector<uint8_t> expected = trip.out.read();
  std::vector<std::thread> threads;
  std::vector<int> failures(16);
  for (size_t i = 0; i < failures.size(); ++i)
    threads.emplace_back([&, i] {
      uint8_t *out = nullptr;
      cudaStream_t own = nullptr;
      std::vector<uint8_t> host(trip.out.size());
      failures[i] += cudaMalloc(&out, host.size()) != cudaSuccess;
      failures[i] += cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) != cudaSuccess;
      for (int call = 0; call < 200; ++call)
        failures[i] += nf4_dequant_launch(&trip.weight.tensor(), out, kKind.dtype, own);
      failures[i] += cudaStreamSynchronize(own) != cudaSuccess;
      failures[i] +=
          cudaMemcpy(host.data(), out, host.size(), cudaMemcpyDeviceToHost) != cudaSuccess;
      failures[i] += host != expected;
      cudaStreamDestroy(own);
      cudaFree(out);
    });
  for (std::thread &thread : threads) thread.join();
  CHECK(failures == std::vector<int>(failures.size()));
}

TEST_CASE("bad launches change nothing", "[cuda]") {
  const RoundTrip trip;
  const Stream stream;
  REQUIRE(trip.quantize(stream) == NF4_STATUS_OK);
  stream.synchronize();
  const auto parts = [&] {
    std::vector<std::vector<uint8_t>> read;
    for (int part = 0; part < kPartCount; ++part)
      if (trip.test.weight.has(Part(part))) read.push_back(trip.weight.read(Part(part)));
    return read;
  };
  const auto before = parts();
  const auto refused = [&](const nf4_tensor &tensor, void *out, const char *word) {
    INFO(word);
    CHECK(nf4_dequant_launch(&tensor, out, kKind.dtype, stream) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(mentions(word));
  };
  nf4_tensor tensor = trip.weight.tensor();
  tensor.blocksize = 48;
  refused(tensor, trip.out.data(), "blocksize");
  tensor = trip.weight.tensor();
  tensor.absmax = nullptr;
  refused(tensor, trip.out.data(), "absmax");
  refused(trip.weight.tensor(), nullptr, "out");
  refused(trip.weight.tensor(), trip.out.data<uint8_t>() + 1, "out");
  refused(trip.weight.tensor(), tensor.packed, "overlaps");
  CHECK(nf4_quantize_launch(trip.in.data(), kKind.dtype, &trip.weight.tensor(),
                            trip.workspace.data(), trip.workspace.size() - 1,
                            stream) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(mentions("workspace_bytes"));
  stream.synchronize();
  const bool unchanged = parts() == before;
  CHECK(unchanged);
  CHECK(trip.out.untouched());
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("host memory is refused where the GPU cannot reach it, else works", "[cuda]") {
  const RoundTrip trip;
  const Stream stream;
  trip.run(stream);
  stream.synchronize();
  const std::vector<uint8_t> expected = trip.out.read();
  std::vector<uint8_t> host(trip.out.size());
  const nf4_status status =
      nf4_dequant_launch(&trip.weight.tensor(), host.data(), kKind.dtype, stream);
  int reaches = 0;
  REQUIRE_CUDA(cudaDeviceGetAttribute(&reaches, cudaDevAttrPageableMemoryAccess, 0));
  if (reaches != 0) {
    REQUIRE(status == NF4_STATUS_OK);
    stream.synchronize();
    CHECK(same_bytes(host, expected));
  } else {
    CHECK(status == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(mentions("out is host memory"));
  }
  void *pinned = nullptr;
  REQUIRE_CUDA(cudaMallocHost(&pinned, host.size()));
  CHECK(nf4_dequant_launch(&trip.weight.tensor(), pinned, kKind.dtype, stream) == NF4_STATUS_OK);
  stream.synchronize();
  CHECK(std::equal(expected.begin(), expected.end(), static_cast<const uint8_t *>(pinned)));
  REQUIRE_CUDA(cudaFreeHost(pinned));
}

// Hidden from plain runs: it needs two GPUs.
TEST_CASE("a second device: memory decides, and the current device stays", "[.two-gpus]") {
  REQUIRE_CUDA(cudaSetDevice(1));
  {
    const RoundTrip trip;
    const Stream stream;
    REQUIRE_CUDA(cudaSetDevice(0));
    const Stream of_device_0;
    trip.run(stream);
    int current = -1;
    REQUIRE_CUDA(cudaGetDevice(&current));
    CHECK(current == 0);
    stream.synchronize();
    CHECK(trip.dequantize(of_device_0) == NF4_STATUS_INVALID_ARGUMENT);
    CHECK(mentions("stream is of device 0"));
    cudaGraphExec_t graph = capture(stream, [&] {
      trip.run(stream);
      // A call on another stream does not disturb the capture.
      CHECK(trip.dequantize(of_device_0) == NF4_STATUS_INVALID_ARGUMENT);
    });
    REQUIRE_CUDA(cudaGraphLaunch(graph, stream));
    stream.synchronize();
    REQUIRE_CUDA(cudaGraphExecDestroy(graph));
    const DeviceBuffer out_of_device_0(trip.out.size());
    CHECK(nf4_dequant_launch(&trip.weight.tensor(), out_of_device_0.data(), kKind.dtype, stream) ==
          NF4_STATUS_INVALID_ARGUMENT);
    CHECK(mentions("device 0"));
    stream.synchronize();
    CHECK(out_of_device_0.untouched());
  }
  REQUIRE_CUDA(cudaSetDevice(0));
}

TEST_CASE("device information", "[cuda]") {
  nf4_device device{};
  device.struct_size = sizeof device;
  REQUIRE(nf4_device_info(0, &device) == NF4_STATUS_OK);
  cudaDeviceProp properties;
  REQUIRE_CUDA(cudaGetDeviceProperties(&properties, 0));
  CHECK(device.compute_capability == properties.major * 10 + properties.minor);
  CHECK(std::string(device.name) == properties.name);
  CHECK(device.multiprocessors == properties.multiProcessorCount);
  CHECK(std::string(device.dequant_variant) != "");
  CHECK(nf4_device_info(1000, &device) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(nf4_device_info(-1, &device) == NF4_STATUS_INVALID_ARGUMENT);
}

// In a process of its own: the context does not recover. Hidden from plain runs.
TEST_CASE("an error of somebody else's kernel is returned, not cleared", "[.sticky]") {
  const RoundTrip trip;
  const Stream stream;
  launch_trap(stream);
  CHECK(cudaStreamSynchronize(stream) != cudaSuccess);
  for (int call = 0; call < 3; ++call) {
    CHECK(trip.dequantize(stream) == NF4_STATUS_CUDA_ERROR);
    CHECK(nf4_last_error()[0] != '\0');
    CHECK(trip.quantize(stream) == NF4_STATUS_CUDA_ERROR);
  }
}

// In a process of its own, as the first use of CUDA: kernels are loaded while capturing.
TEST_CASE("launches that nothing has warmed up are captured", "[.cold]") {
  const RoundTrip trip;
  const Stream stream;
  cudaGraphExec_t graph = capture(stream, [&] { trip.run(stream); });
  REQUIRE_CUDA(cudaGraphLaunch(graph, stream));
  stream.synchronize();
  const std::vector<uint8_t> captured = trip.out.read();
  trip.poison();
  trip.run(stream);
  stream.synchronize();
  CHECK(same_bytes(trip.out.read(), captured));
  REQUIRE_CUDA(cudaGraphExecDestroy(graph));
}

// A fault that memcheck must report, or its silence about everything else means nothing. Hidden
// from plain runs, where the byte would land in the slack of the allocator.
TEST_CASE("one byte past the end of an allocation", "[.planted]") {
  const DeviceBuffer buffer(100, 1);
  launch_write_byte(buffer.data<uint8_t>() + buffer.size());
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}
