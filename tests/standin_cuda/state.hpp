// The state of the stand-in, for the files that stand in for the runtime and the driver.
#pragma once

#include <map>
#include <mutex>

#include "standin_cuda/standin.hpp"

namespace nf4::test::standin {

constexpr int kDefaultSharedBytes = 48 << 10;  // without cudaFuncSetAttribute

struct Machine {
  std::vector<Gpu> gpus;
  int driver = kNewestDriver;
  int current = 0;
  std::vector<int> pushed;  // devices that were current, under those of contexts on top
  unsigned long long first_context = 1;  // of device 0; others follow
  cudaError_t last_error = cudaSuccess;
  cudaError_t sticky = cudaSuccess;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;  // of the one thread
  cudaStream_t capturing = nullptr;
  bool capture_valid = false;
  std::map<cudaStream_t, int> stream_devices;
  // By context, the kernels that may have more shared memory than the default, and how much.
  std::map<std::pair<unsigned long long, const void *>, int> shared_bytes;
  std::vector<Call> calls;
  std::vector<Launched> launches;
  std::vector<std::string> violations;
  Fault fault{};
  int fault_seen = 0;
  bool yielding = false;

  unsigned long long context(int device) const { return first_context + device; }
  const Gpu &gpu() const { return gpus[current]; }
  // Functions that end a capture that is not relaxed, wherever they are called.
  void end_strict_capture() {
    if (capturing != nullptr && capture_mode != cudaStreamCaptureModeRelaxed) capture_valid = false;
  }
};

Machine &machine();
std::recursive_mutex &machine_mutex();

// The name of a kernel, by its function on the host; NULL if there is no such kernel.
const char *kernel_name(const void *function);

// A call from its beginning to its end, which records it. Sites are those of the library.
class Entry {
 public:
  enum class Needs { kNothing, kContext };
  Entry(const char *function, const void *site, Needs needs = Needs::kContext,
        std::string detail = {});
  ~Entry();
  Entry(const Entry &) = delete;
  Entry &operator=(const Entry &) = delete;

  void on_stream(cudaStream_t stream);
  // Whether it fails before it does anything.
  bool failed() const { return result_ != cudaSuccess; }
  cudaError_t error() const { return result_; }
  // Refuses the call, as a GPU would; says why.
  cudaError_t refuse(cudaError_t error, const std::string &why);
  cudaError_t fail(cudaError_t error) { return result_ = error; }

 private:
  std::lock_guard<std::recursive_mutex> lock_;
  size_t call_;
  cudaError_t result_ = cudaSuccess;
};

// What the driver has under a name that was asked for as of a version, or NULL. Returns what is
// wrong with the question, or NULL.
const char *driver_function(const std::string &name, int version, void *&function);

}  // namespace nf4::test::standin
