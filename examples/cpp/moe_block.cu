// Computes a Mixtral-shaped block of experts on raw device buffers; the weights stay in 4 bits. The
// steps are a router, a grouped product for gate and up, a kernel of this file, and a grouped
// product for down that scales its rows by the router's weights. The routing never leaves the GPU,
// so a CUDA graph that is captured once serves every routing of its 40 tokens. Compares the results
// with those of the CPU. Exits with 77 if there is no GPU that libnf4 can use.
//
//   flags=$(pkg-config --cflags --libs nf4)
//   eval "nvcc -std=c++17 --forward-unknown-to-host-compiler moe_block.cu $flags"
#include <cuda_fp16.h>

#include "moe.hpp"
#include "owned.hpp"

namespace {

constexpr int64_t kTokens = 40;
constexpr int kReplays = 3;
// The largest relative error in the 2-norm: two products in fp16 against binary32, and three
// roundings between and after them.
constexpr double kAllowed = 5 * 5e-4;
constexpr int kThreads = 256;

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

struct Routed {
  int32_t *ends, *x_index, *place;
  float *row_scale;
};

// One thread for each token.
__global__ void choose_kernel(const __half *x, const float *router, Choice *choices) {
  const int64_t token = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (token >= kTokens) return;
  float logits[kExperts] = {};
  for (int64_t k = 0; k < kHidden; ++k)
    for (int e = 0; e < kExperts; ++e)
      logits[e] += router[e * kHidden + k] * __half2float(x[token * kHidden + k]);
  choices[token] = choose(logits);
}

// One thread for each expert, whose rows begin after those of the experts before it.
__global__ void sort_kernel(const Choice *choices, Routed routed) {
  const int expert = static_cast<int>(threadIdx.x);
  int32_t row = 0;
  for (int pair = 0; pair < kTokens * kTopK; ++pair)
    row += choices[pair / kTopK].expert[pair % kTopK] < expert;
  for (int pair = 0; pair < kTokens * kTopK; ++pair) {
    const Choice &choice = choices[pair / kTopK];
    if (choice.expert[pair % kTopK] != expert) continue;
    routed.x_index[row] = pair / kTopK;
    routed.row_scale[row] = choice.weight[pair % kTopK];
    routed.place[pair] = row++;
  }
  routed.ends[expert] = row;
}

// hidden = silu(gate) * up, for rows [gate, up]
__global__ void swiglu_kernel(const __half *both, __half *hidden) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= kTokens * kTopK * kIntermediate) return;
  const __half *row = both + i / kIntermediate * 2 * kIntermediate + i % kIntermediate;
  hidden[i] = __float2half(swiglu(__half2float(row[0]), __half2float(row[kIntermediate])));
}

// y of a token = the sum of its rows
__global__ void sum_kernel(const __half *rows, const int32_t *place, __half *y) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= kTokens * kHidden) return;
  float sum = 0;
  for (int choice = 0; choice < kTopK; ++choice)
    sum += __half2float(rows[place[i / kHidden * kTopK + choice] * kHidden + i % kHidden]);
  y[i] = __float2half(sum);
}

// The constructor takes all memory; a call only enqueues.
class DeviceMoe {
 public:
  explicit DeviceMoe(const HostMoe &host)
      : router_(host.router), gate_up_(host.gate_up), down_(host.down) {}

  // x and y: [tokens, hidden].
  void operator()(const __half *x, __half *y, nf4_stream stream) const {
    const Routed routed{ends_.data(), x_index_.data(), place_.data(), row_scale_.data()};
    choose_kernel<<<blocks_for(kTokens), kThreads, 0, stream>>>(x, router_.data(), choices_.data());
    sort_kernel<<<1, kExperts, 0, stream>>>(choices_.data(), routed);
    const nf4_grouped_args first = up_product(x), second = down_product();
    check(nf4_matmul_grouped_launch(&gate_up_.tensor, &first, workspace_.data(), workspace_.count(),
                                    stream));
    swiglu_kernel<<<blocks_for(hidden_.count()), kThreads, 0, stream>>>(both_.data(),
                                                                        hidden_.data());
    check(nf4_matmul_grouped_launch(&down_.tensor, &second, workspace_.data(), workspace_.count(),
                                    stream));
    sum_kernel<<<blocks_for(kTokens * kHidden), kThreads, 0, stream>>>(rows_.data(), place_.data(),
                                                                       y);
    check(cudaGetLastError());
  }

 private:
  static constexpr int64_t kRows = kTokens * kTopK;

  nf4_grouped_args up_product(const __half *x) const {
    nf4_grouped_args args = experts_product(gate_up_.tensor, NF4_DTYPE_FP16, x, kTokens,
                                            both_.data(), kRows, ends_.data());
    args.x_index = x_index_.data();
    return args;
  }

  nf4_grouped_args down_product() const {
    nf4_grouped_args args = experts_product(down_.tensor, NF4_DTYPE_FP16, hidden_.data(), kRows,
                                            rows_.data(), kRows, ends_.data());
    args.row_scale = row_scale_.data();
    return args;
  }

  // One workspace serves both calls, since the stream runs them one after the other.
  size_t workspace_bytes() const {
    const nf4_grouped_args first = up_product(nullptr), second = down_product();
    size_t of_first = 0, of_second = 0;
    check(nf4_matmul_grouped_workspace_size(&gate_up_.tensor, &first, &of_first));
    check(nf4_matmul_grouped_workspace_size(&down_.tensor, &second, &of_second));
    return std::max(of_first, of_second);
  }

  DeviceBuffer<float> router_;
  DeviceWeight gate_up_, down_;
  DeviceBuffer<Choice> choices_{kTokens};
  DeviceBuffer<int32_t> ends_{kExperts}, x_index_{kRows}, place_{kRows};
  DeviceBuffer<float> row_scale_{kRows};
  DeviceBuffer<__half> both_{kRows * 2 * kIntermediate}, hidden_{kRows * kIntermediate},
      rows_{kRows * kHidden};
  DeviceBuffer<uint8_t> workspace_{workspace_bytes()};
};

// The CUDA graph of one call. A capture records libnf4's launches like those of other kernels.
class Graph {
 public:
  template <class Enqueue>
  Graph(cudaStream_t stream, const Enqueue &enqueue) {
    cudaGraph_t captured = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enqueue();
    check(cudaStreamEndCapture(stream, &captured));
    const cudaError_t made = cudaGraphInstantiate(&graph_, captured, 0);
    cudaGraphDestroy(captured);
    check(made);
  }
  ~Graph() { cudaGraphExecDestroy(graph_); }
  Graph(const Graph &) = delete;
  Graph &operator=(const Graph &) = delete;

  void launch(cudaStream_t stream) const { check(cudaGraphLaunch(graph_, stream)); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

int run() {
  if (!have_gpu()) return kSkipped;
  const HostMoe on_host;
  const DeviceMoe moe(on_host);
  const Stream stream = make_stream();
  const DeviceBuffer<__half> x(kTokens * kHidden), y(kTokens * kHidden);
  moe(x.data(), y.data(), stream.get());  // loads the kernels
  check(cudaStreamSynchronize(stream.get()));
  const Graph graph(stream.get(), [&] { moe(x.data(), y.data(), stream.get()); });
  bool good = true;
  for (int replay = 0; replay < kReplays; ++replay) {
    std::vector<float> numbers = random_numbers(x.count(), 1.0f, 4 + replay), got;
    std::vector<__half> halves;
    for (float &number : numbers) {
      halves.push_back(__float2half(number));
      number = __half2float(halves.back());
    }
    check(cudaMemcpyAsync(x.data(), halves.data(), x.count() * sizeof(__half),
                          cudaMemcpyHostToDevice, stream.get()));
    graph.launch(stream.get());
    check(cudaStreamSynchronize(stream.get()));
    for (const __half each : y.to_host()) got.push_back(__half2float(each));
    const double error = relative_error(got, on_host(numbers));
    std::printf("replay %d: %.1e from the CPU's, %.1e allowed\n", replay, error, kAllowed);
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
