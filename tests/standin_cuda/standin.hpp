// A stand-in for the CUDA runtime and the functions of the driver that libnf4 calls: a program that
// is linked against it instead of libcudart believes in GPUs of any kind. No kernel runs. It
// records calls, refuses what a GPU or a stream capture would refuse, and fails calls as told.
// Not thread safe but for calls of CUDA itself.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace nf4::test::standin {

struct Gpu {
  int compute_capability;  // major * 10 + minor
  int multiprocessors;
  int shared_bytes;  // that a CTA may ask for
};

// The GPUs of this machine, device 0 first; none of their contexts, allocations and streams is
// left, and nothing fails.
void set_gpus(const std::vector<Gpu> &gpus);
// The CUDA version of the driver, as cudaDriverGetVersion has it. The stand-in is of a runtime of
// CUDA 12, whatever its headers are, and refuses older drivers. set_gpus installs the newest one.
constexpr int kOldestDriver = 12000, kNewestDriver = 13000;
void set_driver(int version);
// All devices get other contexts, as after cudaDeviceReset: kernels lose their attributes.
void reset_contexts();

// Every call lets other threads run first, so that they meet.
void set_yielding(bool yielding);

// ---- Memory: addresses that no one may follow ------------------------------------------------

// kHost: memory that CUDA was not told of.
enum class MemoryKind { kDevice, kManaged, kPinned, kHost };
constexpr size_t kMemoryBytes = size_t{1} << 44;
// Where so many bytes of a kind begin, each device's own.
uint8_t *memory(MemoryKind kind, int device = 0);

// ---- Streams ---------------------------------------------------------------------------------

cudaStream_t make_stream(int device = 0);
// In the mode cudaStreamCaptureModeGlobal: what is unsafe on any stream ends it.
void begin_capture(cudaStream_t stream);
// Whether it is still valid.
bool end_capture();

// ---- What was called -------------------------------------------------------------------------

struct Call {
  const char *function;
  const void *site;        // where it was called from
  std::string detail;      // the name that was asked for, or the kernel's
  bool on_stream = false;  // has a stream, even the NULL one
  cudaStream_t stream = nullptr;
  cudaError_t result = cudaSuccess;
};

struct Launched {
  std::string kernel;  // as __cudaRegisterFunction names it
  dim3 grid, block;
  size_t shared_bytes;
  unsigned cluster;
  bool pdl;
  int device;
  cudaStream_t stream;
};

const std::vector<Call> &calls();
const std::vector<Launched> &launches();
// Faults in words: what a GPU would have refused, or a library must not do.
const std::vector<std::string> &violations();
void forget_calls();
// The launches in words, a line each, without their streams.
std::string enqueued();

int current_device();
cudaStreamCaptureMode capture_mode();
cudaError_t last_error();  // as cudaPeekAtLastError

// For docs/reliability.md: of a proof that passed, how much was tried.
void proved(const char *proof, size_t count);

// ---- Failures --------------------------------------------------------------------------------

// The nth call, from 1, of a function from a site (NULL: any) returns an error. After a sticky one
// so does all that needs a context, for ever.
struct Fault {
  std::string function;
  const void *site;
  int nth;
  cudaError_t error;
};
void set_fault(const Fault &fault);
void clear_fault();
bool is_sticky(cudaError_t error);

}  // namespace nf4::test::standin
