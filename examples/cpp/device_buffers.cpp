// Dequantizes a weight in GPU memory into fp16, with the CUDA runtime and owned buffers, and
// compares every value with the CPU's answer. Exits 77 where there is no GPU.
#include <cuda_runtime.h>
#include <nf4/nf4.h>

#include <cstddef>
#include <cstdio>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kSkipped = 77;

void check(nf4_status status) {
  if (status != NF4_STATUS_OK)
    throw std::runtime_error(std::string(nf4_status_string(status)) + ": " + nf4_last_error());
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Device memory that frees itself.
template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t count) : count_(count) {
    void *memory = nullptr;
    check(cudaMalloc(&memory, count * sizeof(T)));
    memory_.reset(static_cast<T *>(memory));
  }
  explicit DeviceBuffer(const std::vector<T> &host) : DeviceBuffer(host.size()) {
    check(cudaMemcpy(data(), host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> to_host() const {
    std::vector<T> host(count_);
    check(cudaMemcpy(host.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
  T *data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T *memory) const { cudaFree(memory); }
  };
  std::unique_ptr<T, Free> memory_;
  size_t count_;
};

struct StreamDestroy {
  void operator()(nf4_stream stream) const { cudaStreamDestroy(stream); }
};
using Stream = std::unique_ptr<CUstream_st, StreamDestroy>;

Stream make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return Stream(stream);
}

// A double-quantized NF4 weight in host memory, laid out as a checkpoint stores it.
struct HostWeight {
  nf4_tensor tensor{};
  std::vector<uint8_t> packed, absmax;
  std::vector<float> nested_absmax, nested_code, nested_offset;

  HostWeight(const std::vector<float> &dense, int64_t rows, int64_t cols) {
    tensor.struct_size = sizeof tensor;
    tensor.format = NF4_FORMAT_NF4;
    tensor.blocksize = 64;
    tensor.nested_blocksize = 256;
    tensor.rows = rows;
    tensor.cols = cols;

    nf4_sizes sizes{};
    sizes.struct_size = sizeof sizes;
    check(nf4_tensor_sizes(&tensor, &sizes));
    packed.resize(sizes.packed_bytes);
    absmax.resize(sizes.absmax_bytes);
    nested_absmax.resize(sizes.nested_blocks);
    nested_code.assign(nf4_scale_code(), nf4_scale_code() + 256);
    nested_offset.resize(1);
    tensor.packed = packed.data();
    tensor.absmax = absmax.data();
    tensor.nested_absmax = nested_absmax.data();
    tensor.nested_code = nested_code.data();
    tensor.nested_offset = nested_offset.data();

    size_t workspace_bytes = 0;
    check(nf4_quantize_workspace_size(&tensor, &workspace_bytes));
    std::vector<std::max_align_t> workspace(workspace_bytes / sizeof(std::max_align_t) + 1);
    check(nf4_quantize_cpu(dense.data(), NF4_DTYPE_FP32, &tensor, workspace.data(), workspace_bytes,
                           0));
  }
};

std::vector<float> random_numbers(size_t count) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> numbers(count);
  for (float &number : numbers) number = normal(generator);
  return numbers;
}

int run() {
  nf4_device info{};
  info.struct_size = sizeof info;
  const nf4_status usable = nf4_device_info(0, &info);
  if (usable == NF4_STATUS_NO_DEVICE || usable == NF4_STATUS_UNSUPPORTED_DEVICE) {
    std::printf("skipped: %s\n", nf4_last_error());
    return kSkipped;
  }
  check(usable);
  std::printf("%s, kernels %s\n", info.name, info.dequant_variant);

  const int64_t rows = 1024, cols = 1376;
  const HostWeight weight(random_numbers(rows * cols), rows, cols);
  std::vector<uint16_t> expected(rows * cols);
  check(nf4_dequant_cpu(&weight.tensor, expected.data(), NF4_DTYPE_FP16, 0));

  const DeviceBuffer<uint8_t> packed(weight.packed), absmax(weight.absmax);
  const DeviceBuffer<float> nested_absmax(weight.nested_absmax), nested_code(weight.nested_code),
      nested_offset(weight.nested_offset);
  const DeviceBuffer<uint16_t> out(rows * cols);
  nf4_tensor on_device = weight.tensor;
  on_device.packed = packed.data();
  on_device.absmax = absmax.data();
  on_device.nested_absmax = nested_absmax.data();
  on_device.nested_code = nested_code.data();
  on_device.nested_offset = nested_offset.data();

  const Stream stream = make_stream();
  check(nf4_dequant_launch(&on_device, out.data(), NF4_DTYPE_FP16, stream.get()));
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
