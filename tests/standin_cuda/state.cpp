#include "standin_cuda/state.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

namespace nf4::test::standin {
namespace {

constexpr int kMaxGpus = 4;

// One for each kind and device, reserved and never to be touched.
uint8_t *reserve() {
  void *address =
      mmap(nullptr, kMemoryBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address != MAP_FAILED) return static_cast<uint8_t *>(address);
  std::perror("reserving addresses for a GPU that there is not");
  std::abort();
}

}  // namespace

Machine &machine() {
  static Machine only;
  return only;
}

std::recursive_mutex &machine_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

void set_gpus(const std::vector<Gpu> &gpus) {
  const unsigned long long next = machine().first_context + kMaxGpus;
  machine() = {};
  machine().gpus = gpus;
  machine().first_context = next;
}

void set_driver(int version) { machine().driver = version; }

void set_yielding(bool yielding) { machine().yielding = yielding; }

void reset_contexts() { machine().first_context += kMaxGpus; }

uint8_t *memory(MemoryKind kind, int device) {
  static uint8_t *of_device[kMaxGpus], *managed, *pinned, *host;
  uint8_t *&address = kind == MemoryKind::kDevice    ? of_device[device]
                      : kind == MemoryKind::kManaged ? managed
                      : kind == MemoryKind::kPinned  ? pinned
                                                     : host;
  if (address == nullptr) address = reserve();
  return address;
}

cudaStream_t make_stream(int device) {
  // A number that is no address, and no number of CUDA's own streams.
  static uintptr_t streams = 0;
  auto *const stream = reinterpret_cast<cudaStream_t>(++streams << 12);
  machine().stream_devices[stream] = device;
  return stream;
}

void begin_capture(cudaStream_t stream) {
  machine().capturing = stream;
  machine().capture_valid = true;
}

bool end_capture() {
  machine().capturing = nullptr;
  return machine().capture_valid;
}

const std::vector<Call> &calls() { return machine().calls; }
const std::vector<Launched> &launches() { return machine().launches; }
const std::vector<std::string> &violations() { return machine().violations; }
void forget_calls() {
  machine().calls.clear();
  machine().launches.clear();
  machine().violations.clear();
}

std::string enqueued() {
  std::string all;
  for (const Launched &each : launches()) {
    char text[128];
    std::snprintf(text, sizeof text, "<<<%u, %u, %zu>>> cluster %u%s on device %d\n", each.grid.x,
                  each.block.x, each.shared_bytes, each.cluster, each.pdl ? " pdl" : "",
                  each.device);
    all += each.kernel + text;
  }
  return all;
}

int current_device() { return machine().current; }
cudaStreamCaptureMode capture_mode() { return machine().capture_mode; }
cudaError_t last_error() { return machine().last_error; }

void proved(const char *proof, size_t count) {
  const char *const path = std::getenv("NF4_PROOFS");
  std::FILE *const file = path == nullptr ? nullptr : std::fopen(path, "a");
  if (file == nullptr) return;
  std::fprintf(file, "%s %zu\n", proof, count);
  std::fclose(file);
}

void set_fault(const Fault &fault) {
  machine().fault = fault;
  machine().fault_seen = 0;
}
void clear_fault() { set_fault({}); }

// Errors after which a context is lost (CUDA Runtime API, "Data types used by CUDA Runtime").
bool is_sticky(cudaError_t error) {
  return error == cudaErrorLaunchFailure || error == cudaErrorIllegalAddress ||
         error == cudaErrorLaunchTimeout || error == cudaErrorAssert;
}

namespace {

std::recursive_mutex &mutex_after_others() {
  if (machine().yielding) std::this_thread::yield();
  return machine_mutex();
}

}  // namespace

Entry::Entry(const char *function, const void *site, Needs needs, std::string detail)
    : lock_(mutex_after_others()), call_(machine().calls.size()) {
  Machine &m = machine();
  m.calls.push_back({function, site, std::move(detail)});
  const Fault &fault = m.fault;
  const bool meant = fault.function == function && (fault.site == nullptr || fault.site == site);
  if (meant && ++m.fault_seen == fault.nth) {
    result_ = fault.error;
    if (is_sticky(fault.error)) m.sticky = fault.error;
  } else if (needs == Needs::kContext) {
    result_ = m.sticky;
  }
}

Entry::~Entry() {
  machine().calls[call_].result = result_;
  if (result_ != cudaSuccess) machine().last_error = result_;
}

void Entry::on_stream(cudaStream_t stream) {
  machine().calls[call_].on_stream = true;
  machine().calls[call_].stream = stream;
}

cudaError_t Entry::refuse(cudaError_t error, const std::string &why) {
  machine().violations.push_back(std::string(machine().calls[call_].function) + ": " + why);
  return result_ = error;
}

}  // namespace nf4::test::standin
