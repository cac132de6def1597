// Dequantizes a weight in GPU memory to fp16, with the CUDA runtime and owned buffers, and compares
// every value with the result of the CPU. Exits with 77 if there is no GPU that libnf4 can use.
//
//   flags=$(pkg-config --cflags --libs nf4)
//   eval "nvcc -std=c++17 --forward-unknown-to-host-compiler device_buffers.cpp $flags"
#include "owned.hpp"

namespace {

int run() {
  if (!have_gpu()) return kSkipped;

  const int64_t rows = 1024, cols = 1376;
  const HostWeight weight(random_numbers(rows * cols, 0.02f, 1), rows, cols);
  std::vector<uint16_t> expected(rows * cols);
  check(nf4_dequant_cpu(&weight.tensor, expected.data(), NF4_DTYPE_FP16, 0));

  const DeviceWeight on_device(weight);
  const DeviceBuffer<uint16_t> out(rows * cols);
  const Stream stream = make_stream();
  check(nf4_dequant_launch(&on_device.tensor, out.data(), NF4_DTYPE_FP16, stream.get()));
  check(cudaStreamSynchronize(stream.get()));

  const std::vector<uint16_t> got = out.to_host();
  size_t wrong = 0;
  for (size_t i = 0; i < got.size(); ++i) wrong += got[i] != expected[i];
  std::printf("%zu values, %zu differ from the CPU's\n", got.size(), wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
