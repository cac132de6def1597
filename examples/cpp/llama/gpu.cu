// The model on a GPU, in bf16: one stream, and a CUDA graph of a step of decode.
#include <cuda_runtime.h>

#include "generate.hpp"
#include "gpu_kernels.cuh"

inline void check(cudaError_t error) { require(error == cudaSuccess, cudaGetErrorString(error)); }

namespace {

using Stream = std::unique_ptr<CUstream_st, cudaError_t (*)(cudaStream_t)>;

Stream make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return {stream, cudaStreamDestroy};
}

class Gpu {
 public:
  using T = bf16;
  static constexpr const char *kName = "gpu";

  explicit Gpu(const nf4_device &device) : device_(device) {}
  ~Gpu() { cudaGraphExecDestroy(graph_); }
  Gpu(const Gpu &) = delete;
  Gpu &operator=(const Gpu &) = delete;

  template <class U>
  U *allocate(size_t count, const std::string &what) {
    void *memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, count * sizeof(U));
    require(error != cudaErrorMemoryAllocation, "too little memory on the GPU: ", what, " takes ",
            count * sizeof(U) / 1e9, " GB");
    check(error);
    memory_.emplace_back(memory, cudaFree);
    return static_cast<U *>(memory);
  }
  template <class U>
  void upload(U *to, const U *from, size_t count) {
    check(cudaMemcpyAsync(to, from, count * sizeof(U), cudaMemcpyHostToDevice, stream_.get()));
    check(cudaStreamSynchronize(stream_.get()));
  }
  template <class U>
  std::vector<U> download(const U *from, size_t count) const {
    std::vector<U> host(count);
    check(cudaMemcpyAsync(host.data(), from, count * sizeof(U), cudaMemcpyDeviceToHost,
                          stream_.get()));
    check(cudaStreamSynchronize(stream_.get()));
    return host;
  }
  void *place(const View &view) {
    auto *memory = allocate<uint8_t>(view.bytes, view.name);
    upload(memory, view.data, view.bytes);
    return memory;
  }

  // Before the weights are copied: is the model one that has kernels? And attention's memory.
  void prepare(const Config &config) {
    const int64_t dim = config.head_dim, most = kMaxBatch * config.heads;
    require(dim == 16 || dim == 32 || dim == 64 || dim == 128, "config.json: head_dim is ", dim,
            "; 16, 32, 64 and 128 have a kernel");
    for (const auto &[name, size] : {std::pair{"hidden_size", config.hidden},
                                     std::pair{"intermediate_size", config.intermediate}})
      require(size % 8 == 0, "config.json: ", name, " is ", size, "; multiples of 8 are computed");
    partials_ = allocate<float>(most * kMaxSplits * (dim + 2), "attention");
    ended_ = allocate<unsigned>(most, "attention");
    check(cudaMemsetAsync(ended_, 0, most * sizeof *ended_, stream_.get()));
  }

  // The workspace of products of up to m rows; fewer never need more.
  void reserve(const Group &group, int64_t m) {
    const Products of(group, NF4_DTYPE_BF16, static_cast<const bf16 *>(nullptr), m,
                      static_cast<bf16 *>(nullptr));
    size_t nf4 = 0, int4 = 0;
    check(nf4_matmul_batch_workspace_size(of.nf4.data(), of.nf4_args.data(), of.nf4.size(), &nf4));
    check(nf4_int4_matmul_batch_workspace_size(of.int4.data(), of.int4_args.data(), of.int4.size(),
                                               &int4));
    if (std::max(nf4, int4) <= workspace_bytes_) return;
    workspace_bytes_ = std::max(nf4, int4);
    workspace_ = allocate<uint8_t>(workspace_bytes_, "the workspace");
  }

  // After the first step, which loads the kernels, all are replays of one graph: what changes is in
  // the memory that it reads.
  template <class Step>
  void repeat(const Step &step) {
    if (graph_) return check(cudaGraphLaunch(graph_, stream_.get()));
    step();
    cudaGraph_t captured = nullptr;
    check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
    step();
    check(cudaStreamEndCapture(stream_.get(), &captured));
    const cudaError_t made = cudaGraphInstantiate(&graph_, captured, 0);
    cudaGraphDestroy(captured);
    check(made);
  }

  template <class Function>
  void for_each(int64_t count, const Function &function) {
    launch(for_each_kernel<Function>, dim3((count + 255) / 256), 256, count, function);
  }

  void products(const Group &group, const bf16 *x, int64_t m, bf16 *y) {
    const Products of(group, NF4_DTYPE_BF16, x, m, y);
    check(nf4_matmul_batch_launch(of.nf4.data(), of.nf4_args.data(), of.nf4.size(), workspace_,
                                  workspace_bytes_, stream_.get()));
    check(nf4_int4_matmul_batch_launch(of.int4.data(), of.int4_args.data(), of.int4.size(),
                                       workspace_, workspace_bytes_, stream_.get()));
    for (size_t i = 0; i < of.dense.size(); ++i) {
      const Linear &part = *of.dense[i];
      const nf4_matmul_args &args = of.dense_args[i];
      const int block = m == 1 ? 1 : 8;
      launch(m == 1 ? dense_kernel<1> : dense_kernel<8>,
             dim3((part.rows + kWarps - 1) / kWarps, (m + block - 1) / block), kThreads,
             static_cast<const bf16 *>(part.dense), static_cast<const bf16 *>(part.bias), x, m,
             part.rows, part.cols, static_cast<bf16 *>(args.y), group.rows);
    }
  }

  void norm(int64_t m, const Norm<bf16> &of) { launch(norm_kernel, dim3(m), 512, of); }

  void attention(const Attention<bf16> &of) {
    if (of.dim == 16) return attention_of<16>(of);
    if (of.dim == 32) return attention_of<32>(of);
    if (of.dim == 64) return attention_of<64>(of);
    attention_of<128>(of);
  }

  void choose(const bf16 *logits, int64_t width, const Rows &rows) {
    launch(choose_kernel, dim3(rows.count), 1024, logits, width, rows);
  }

 private:
  static constexpr int64_t kMaxSplits = 32;

  template <int D>
  void attention_of(const Attention<bf16> &of) {
    const int64_t m = of.rows.count;
    if (m > int64_t{kMaxBatch})  // of one prompt
      return launch(attention_kernel<D, 4>, dim3(of.heads, (m + 3) / 4), kThreads, of, nullptr,
                    nullptr);
    // About four CTAs for each multiprocessor.
    const int64_t splits =
        std::clamp<int64_t>(4 * device_.multiprocessors / (m * of.heads), 1, kMaxSplits);
    launch(attention_kernel<D, 1>, dim3(of.heads, m, splits), kThreads, of, partials_, ended_);
  }

  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), dim3 grid, int threads,
              const Arguments &...arguments) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.stream = stream_.get();
    config.attrs = &early;
    config.numAttrs = device_.compute_capability >= 90;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
  }

  nf4_device device_;
  Stream stream_ = make_stream();
  std::vector<std::unique_ptr<void, cudaError_t (*)(void *)>> memory_;
  void *workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  float *partials_ = nullptr;
  unsigned *ended_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace

bool generate_on_gpu(const Options &options) {
  nf4_device device{};
  device.struct_size = sizeof device;
  const nf4_status usable = nf4_device_info(0, &device);
  if (usable == NF4_STATUS_NO_CUDA || usable == NF4_STATUS_NO_DEVICE ||
      usable == NF4_STATUS_UNSUPPORTED_DEVICE) {
    std::fprintf(stderr, "no GPU: %s\n", nf4_last_error());
    return false;
  }
  check(usable);
  Gpu gpu(device);
  generate(options, gpu);
  return true;
}
