// Runs the model on a GPU, in bf16, on one stream. A step of decode is a CUDA graph.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "model.hpp"

namespace {

void check(cudaError_t error) { require(error == cudaSuccess, cudaGetErrorString(error)); }

// Declares the type of a method's teams, for decltype.
template <class Step, class Team, class... Arguments>
Team team_of(void (Step::*)(Team, int, Arguments...));

template <auto kMethod, class Step, class... Arguments>
__global__ void __launch_bounds__(kThreads) kernel(int count, Step step, Arguments... arguments) {
  using Team = decltype(team_of(kMethod));
#if __CUDA_ARCH__ >= 900
  // The next kernel may start early; this one waits here for the previous one.
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
  const int i = blockIdx.x * (kThreads / Team::size) + threadIdx.x / Team::size;
  if (i < count) (step.*kMethod)({int(threadIdx.x) % Team::size}, i, arguments...);
}

class Gpu {
 public:
  template <int kTeam>
  struct Team {
    static constexpr int size = kTeam;
    int rank;

    __device__ float max(float value) const { return reduce(value, fmaxf); }
    __device__ float sum(float value) const {
      return reduce(value, [](float a, float b) { return a + b; });
    }
    __device__ void sync() const { __syncthreads(); }
    __device__ float *memory(int) const {
      __shared__ float memory[kTile + kTeam * 8];
      return memory;
    }
    template <class Join>
    __device__ float reduce(float value, Join join) const {
      __shared__ float warps[32];
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
  using T = __nv_bfloat16;
  static constexpr bool kReadsHost = false;

  Gpu() {
    nf4_device device{sizeof device, 0, 0, 0, 0, 0, 0, 0, "", ""};
    nf4::check(nf4_device_info(0, &device));  // loads libnf4's kernels
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  void *allocate(size_t bytes) {  // NULL if there is not enough memory
    void *memory = nullptr;
    cudaMalloc(&memory, bytes);
    return memory_.emplace_back(memory, cudaFree).get();
  }
  void *copy(void *to, const void *from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
    check(cudaStreamSynchronize(stream_));
    return to;
  }
  void multiply(const nf4::Products &products) {
    if (const size_t bytes = products.workspace_size(); bytes > workspace_bytes_) {
      workspace_ = allocate(workspace_bytes_ = bytes);
      require(workspace_, "too little memory: the workspace takes ", bytes / 1e9, " GB");
    }
    products.launch(workspace_, workspace_bytes_, stream_);
  }
  // Calls a method for 0, 1, ..., count - 1.
  template <auto kMethod, class... Arguments>
  void run(int64_t count, int64_t, Step<Gpu> step, Arguments... arguments) {
    constexpr int kTeam = decltype(team_of(kMethod))::size;
    const auto function = kernel<kMethod, Step<Gpu>, Arguments...>;
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaFuncAttributes compiled{};  // a kernel of PTX before 9.0 does not wait for the previous one
    check(cudaFuncGetAttributes(&compiled, function));
    const dim3 grid((count * kTeam + kThreads - 1) / kThreads);
    const cudaLaunchConfig_t config{grid, kThreads, 0, stream_, &early, compiled.ptxVersion >= 90};
    check(cudaLaunchKernelEx(&config, function, int(count), step, arguments...));
  }
  // The first step loads the kernels. All later ones replay one graph; only the contents of memory
  // change.
  void repeat(const std::function<void()> &step) {
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
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace

void generate_on_gpu(const Options &options) { generate(options, Gpu()); }
