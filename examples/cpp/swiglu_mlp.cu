// Computes the MLP of a LLaMA-shaped model, y = down(silu(gate(x)) * up(x)), on weights that stay
// in 4 bits. Three steps run in order on one stream: gate and up in one call of libnf4 (one launch
// for few rows), a kernel of this file, and down. The program runs a prompt, then single tokens,
// and compares the results with those of the CPU. Exits with 77 if there is no GPU that libnf4 can
// use.
//
//   flags=$(pkg-config --cflags --libs nf4)
//   eval "nvcc -std=c++17 --forward-unknown-to-host-compiler swiglu_mlp.cu $flags"
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>

#include "owned.hpp"

namespace {

constexpr int64_t kHidden = 512, kIntermediate = 1376, kPrompt = 40;
constexpr int kTokens = 3;

// The largest error of a matmul in fp16: the 2-norm of the difference from the exact product of the
// same numbers, over the norm of that product.
constexpr double kMatmulError = 5e-4;
// The GPU and the CPU both have errors: three products and the rounding of the values between them.
constexpr double kAllowed = 2 * 4 * kMatmulError;

__host__ __device__ float swiglu(float gate, float up) { return gate / (1 + expf(-gate)) * up; }

// gate[i] = silu(gate[i]) * up[i]
__global__ void swiglu_kernel(__half *gate, const __half *up, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) gate[i] = __float2half(swiglu(__half2float(gate[i]), __half2float(up[i])));
}

// The args of y = x W^T for m rows of x; x and y are contiguous.
nf4_matmul_args product(const nf4_tensor &weight, const __half *x, int64_t m, __half *y) {
  nf4_matmul_args args{};
  args.struct_size = sizeof args;
  args.dtype = NF4_DTYPE_FP16;
  args.m = m;
  args.x = x;
  args.x_stride = weight.cols;
  args.y = y;
  args.y_stride = weight.rows;
  return args;
}

struct HostMlp {
  HostWeight gate{random_numbers(kIntermediate * kHidden, 0.02f, 1), kIntermediate, kHidden};
  HostWeight up{random_numbers(kIntermediate * kHidden, 0.02f, 2), kIntermediate, kHidden};
  HostWeight down{random_numbers(kHidden * kIntermediate, 0.02f, 3), kHidden, kIntermediate};

  std::vector<__half> operator()(const std::vector<__half> &x) const {
    const int64_t m = static_cast<int64_t>(x.size()) / kHidden;
    std::vector<__half> hidden(m * kIntermediate), upper(m * kIntermediate), y(x.size());
    const nf4_tensor *const weights[] = {&gate.tensor, &up.tensor};
    const nf4_matmul_args args[] = {product(gate.tensor, x.data(), m, hidden.data()),
                                    product(up.tensor, x.data(), m, upper.data())};
    check(nf4_matmul_batch_cpu(weights, args, 2, 0));
    for (size_t i = 0; i < hidden.size(); ++i)
      hidden[i] = __float2half(swiglu(__half2float(hidden[i]), __half2float(upper[i])));
    const nf4_matmul_args last = product(down.tensor, hidden.data(), m, y.data());
    check(nf4_matmul_cpu(&down.tensor, &last, 0));
    return y;
  }
};

// The same on a GPU. The constructor takes all memory, for up to max_m rows of x; a call only
// enqueues.
class DeviceMlp {
 public:
  DeviceMlp(const HostMlp &host, int64_t max_m)
      : gate_(host.gate),
        up_(host.up),
        down_(host.down),
        hidden_(max_m * kIntermediate),
        upper_(max_m * kIntermediate),
        workspace_(workspace_bytes(max_m)) {}

  void operator()(const __half *x, int64_t m, __half *y, nf4_stream stream) const {
    const nf4_tensor *const weights[] = {&gate_.tensor, &up_.tensor};
    const nf4_matmul_args args[] = {product(gate_.tensor, x, m, hidden_.data()),
                                    product(up_.tensor, x, m, upper_.data())};
    check(nf4_matmul_batch_launch(weights, args, 2, workspace_.data(), workspace_.count(), stream));
    const int64_t count = m * kIntermediate;
    const int threads = 256;
    const auto blocks = static_cast<unsigned>((count + threads - 1) / threads);
    swiglu_kernel<<<blocks, threads, 0, stream>>>(hidden_.data(), upper_.data(), count);
    check(cudaGetLastError());
    const nf4_matmul_args last = product(down_.tensor, hidden_.data(), m, y);
    check(nf4_matmul_launch(&down_.tensor, &last, workspace_.data(), workspace_.count(), stream));
  }

 private:
  // One workspace serves both calls, since the stream runs them one after the other. Fewer rows
  // never need more.
  size_t workspace_bytes(int64_t max_m) const {
    const nf4_tensor *const weights[] = {&gate_.tensor, &up_.tensor};
    const nf4_matmul_args args[] = {product(gate_.tensor, nullptr, max_m, nullptr),
                                    product(up_.tensor, nullptr, max_m, nullptr)};
    const nf4_matmul_args last = product(down_.tensor, nullptr, max_m, nullptr);
    size_t first = 0, second = 0;
    check(nf4_matmul_batch_workspace_size(weights, args, 2, &first));
    check(nf4_matmul_workspace_size(&down_.tensor, &last, &second));
    return std::max(first, second);
  }

  DeviceWeight gate_, up_, down_;
  DeviceBuffer<__half> hidden_, upper_;
  DeviceBuffer<uint8_t> workspace_;
};

std::vector<__half> random_halves(size_t count, unsigned seed) {
  const std::vector<float> numbers = random_numbers(count, 1.0f, seed);
  std::vector<__half> halves(count);
  std::transform(numbers.begin(), numbers.end(), halves.begin(),
                 [](float number) { return __float2half(number); });
  return halves;
}

// ||got - expected|| / ||expected||
double relative_error(const std::vector<__half> &got, const std::vector<__half> &expected) {
  double off = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double wanted = __half2float(expected[i]), difference = __half2float(got[i]) - wanted;
    off += difference * difference;
    size += wanted * wanted;
  }
  return std::sqrt(off / size);
}

int run() {
  if (!have_gpu()) return kSkipped;
  const HostMlp on_host;
  const DeviceMlp mlp(on_host, kPrompt);
  const Stream stream = make_stream();
  bool good = true;
  for (int step = 0; step <= kTokens; ++step) {
    const int64_t m = step == 0 ? kPrompt : 1;
    const std::vector<__half> x = random_halves(m * kHidden, 4 + step);
    const DeviceBuffer<__half> device_x(x), device_y(x.size());
    mlp(device_x.data(), m, device_y.data(), stream.get());
    check(cudaStreamSynchronize(stream.get()));
    const double error = relative_error(device_y.to_host(), on_host(x));
    std::printf("%2lld rows: %.1e from the CPU's, %.1e allowed\n", static_cast<long long>(m), error,
                kAllowed);
    good = good && error <= kAllowed;  // false for NaN, too
  }
  return good ? 0 : 1;
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
