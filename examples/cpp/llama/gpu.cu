// The model on a GPU, in bf16: one stream, and a CUDA graph of a step of decode.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "generate.hpp"

inline void check(cudaError_t error) { require(error == cudaSuccess, cudaGetErrorString(error)); }

namespace {

constexpr int kThreads = 512;  // of a block

template <int kTeam>
struct Team {
  static constexpr int size = kTeam;
  int rank;
  float *memory;  // shared

  __device__ float sum(float value) { return reduce<false>(value); }
  __device__ float max(float value) { return reduce<true>(value); }
  __device__ void sync() { __syncthreads(); }

  template <bool kMax>
  __device__ float reduce(float value) {
    __shared__ float warps[32];
    const auto join = [](float a, float b) { return kMax ? fmaxf(a, b) : a + b; };
    for (int offset = 1; offset < 32; offset *= 2)
      value = join(value, __shfl_xor_sync(~0u, value, offset));
    if (size == 32) return value;
    if (rank % 32 == 0) warps[rank / 32] = value;
    __syncthreads();
    value = warps[0];
    for (int warp = 1; warp < size / 32; ++warp) value = join(value, warps[warp]);
    __syncthreads();
    return value;
  }
};

// The class of the teams of a method.
template <class Step, class Team, class... Arguments>
Team team_of(void (Step::*)(Team, int, Arguments...));

template <auto kMethod, class Step, class... Arguments>
__global__ void __launch_bounds__(kThreads) kernel(int count, Step step, Arguments... arguments) {
  using Team = decltype(team_of(kMethod));
  extern __shared__ float memory[];
#if __CUDA_ARCH__ >= 900
  // The next kernel may start early; this one waits here for the last.
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
  const int i = blockIdx.x * (kThreads / Team::size) + threadIdx.x / Team::size;
  if (i < count) (step.*kMethod)({int(threadIdx.x) % Team::size, memory}, i, arguments...);
}

class Gpu {
 public:
  using Thread = Team<1>;
  using Warp = Team<32>;
  using Block = Team<kThreads>;
  using T = __nv_bfloat16;
  static constexpr const char *kName = "gpu";
  static constexpr bool kReadsHost = false;

  Gpu() {
    nf4_device device{};
    device.struct_size = sizeof device;
    check(nf4_device_info(0, &device));  // loads libnf4's kernels
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  template <class U>
  U *allocate(size_t count, const std::string &what) {
    void *memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, count * sizeof(U));
    require(error == cudaSuccess, "too little memory on the GPU: ", what, " takes ",
            count * sizeof(U) / 1e9, " GB; ", cudaGetErrorString(error));
    memory_.emplace_back(memory, cudaFree);
    return static_cast<U *>(memory);
  }
  void copy(void *to, const void *from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
    check(cudaStreamSynchronize(stream_));
  }
  void multiply(const Products &of) {
    size_t nf4 = 0, int4 = 0;
    check(nf4_matmul_batch_workspace_size(of.nf4.data(), of.nf4_args.data(), of.nf4.size(), &nf4));
    check(nf4_int4_matmul_batch_workspace_size(of.int4.data(), of.int4_args.data(), of.int4.size(),
                                               &int4));
    if (std::max(nf4, int4) > workspace_bytes_) {
      workspace_bytes_ = std::max(nf4, int4);
      workspace_ = allocate<uint8_t>(workspace_bytes_, "the workspace");
    }
    check(nf4_matmul_batch_launch(of.nf4.data(), of.nf4_args.data(), of.nf4.size(), workspace_,
                                  workspace_bytes_, stream_));
    check(nf4_int4_matmul_batch_launch(of.int4.data(), of.int4_args.data(), of.int4.size(),
                                       workspace_, workspace_bytes_, stream_));
  }

  // Shared memory for attention, which has the scores of all keys there, and sums of columns.
  void prepare(const Step<Gpu> &step) {
    shared_bytes_ = (int64_t{step.context} + std::max(step.dim, kThreads * step.kSize)) * 4;
    require(shared_bytes_ < 1 << 30 &&
                cudaFuncSetAttribute(kernel<&Step<Gpu>::attend, Step<Gpu>, T *, T *>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(shared_bytes_)) == cudaSuccess,
            "too little shared memory for the scores of ", step.context, " tokens");
  }
  // Calls a method for 0, 1, ..., count - 1.
  template <auto kMethod, class... Arguments>
  void run(int64_t count, int64_t, Step<Gpu> step, Arguments... arguments) {
    constexpr int kTeam = decltype(team_of(kMethod))::size;
    const auto function = kernel<kMethod, Step<Gpu>, Arguments...>;
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = (count * kTeam + kThreads - 1) / kThreads;
    config.blockDim = kThreads;
    config.stream = stream_;
    config.attrs = &early;
    cudaFuncAttributes compiled{};
    check(cudaFuncGetAttributes(&compiled, function));
    config.numAttrs = compiled.ptxVersion >= 90;  // a kernel of older PTX does not wait
    if (std::is_same_v<decltype(kMethod), decltype(&Step<Gpu>::attend)>)
      config.dynamicSmemBytes = shared_bytes_;
    check(cudaLaunchKernelEx(&config, function, int(count), step, arguments...));
  }

  // After the first step, which loads the kernels, all are replays of one graph: what changes is in
  // the memory that it reads.
  template <class Function>
  void repeat(const Function &step) {
    if (graph_) return check(cudaGraphLaunch(graph_, stream_));
    step();
    cudaGraph_t captured = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    step();
    check(cudaStreamEndCapture(stream_, &captured));
    check(cudaGraphInstantiate(&graph_, captured, 0));
    check(cudaGraphDestroy(captured));
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<std::unique_ptr<void, cudaError_t (*)(void *)>> memory_;
  void *workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  int64_t shared_bytes_ = 0;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace

void generate_on_gpu(const Options &options) {
  Gpu gpu;
  generate(options, gpu);
}
