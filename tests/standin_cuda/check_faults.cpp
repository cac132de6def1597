// Every call of CUDA fails once, in every function that calls it, with each of five errors.
#include <cstring>
#include <map>
#include <set>

#include "standin_cuda/abi_calls.hpp"
#include "standin_cuda/child.hpp"
#include "standin_cuda/machines.hpp"
#include "support/catch.hpp"

using namespace nf4::test::standin;

namespace {

constexpr cudaError_t kErrors[] = {cudaErrorMemoryAllocation, cudaErrorInvalidValue,
                                   cudaErrorNoDevice, cudaErrorLaunchFailure,
                                   cudaErrorInsufficientDriver};

// As nf4.h has it.
nf4_status status_of(cudaError_t error) {
  return error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ? NF4_STATUS_NO_DEVICE
                                                                            : NF4_STATUS_CUDA_ERROR;
}

// Where a call that works calls CUDA: the first, the second and the last call of each place.
struct Site {
  const char *function;
  const void *site;
  int nth;
  bool optional;  // the library does without it
};
static_assert(std::is_trivially_copyable_v<Site>);

bool is_optional(const Call &call) {
  return std::strcmp(call.function, "cuCtxGetId") == 0 || call.detail == "cuCtxGetId";
}

std::vector<Site> sites_of(const AbiCall &call, cudaStream_t stream) {
  const std::string bytes = in_child([&] {
    call.launch(stream);
    std::map<const void *, int> count;
    for (const Call &each : calls()) ++count[each.site];
    std::map<const void *, int> seen;
    std::string found;
    for (const Call &each : calls()) {
      const int nth = ++seen[each.site];
      if (nth > 2 && nth != count[each.site]) continue;
      const Site site{each.function, each.site, nth, is_optional(each)};
      found.append(reinterpret_cast<const char *>(&site), sizeof site);
    }
    return found;
  });
  REQUIRE(bytes.size() % sizeof(Site) == 0);
  std::vector<Site> sites(bytes.size() / sizeof(Site));
  std::memcpy(sites.data(), bytes.data(), bytes.size());
  return sites;
}

// One failure, and what the library makes of it.
class Failure {
 public:
  Failure(const AbiCall &call, cudaStream_t stream, const std::string &clean, const Site &site,
          cudaError_t error)
      : call_(call), stream_(stream), clean_(clean), site_(site), error_(error) {}

  std::string complaints() {
    set_fault({site_.function, site_.site, site_.nth, error_});
    const int device = current_device();
    const nf4_status status = call_.launch(stream_);
    // The device's restoration is the last thing: what was enqueued is. A context that is not
    // popped stays current, too.
    const bool moved = current_device() != device;
    const bool restoring = std::strcmp(site_.function, "cudaSetDevice") == 0 && moved;
    const bool popping = std::strcmp(site_.function, "cuCtxPopCurrent") == 0 && moved;
    if (restoring || (site_.optional && !is_sticky(error_)))
      check_success(status);
    else if (!site_.optional || status != NF4_STATUS_OK)
      check_failure(status);
    if (!restoring && !popping && moved) complain("another device is current");
    if (std::strcmp(site_.function, "cudaThreadExchangeStreamCaptureMode") != 0 &&
        capture_mode() != cudaStreamCaptureModeGlobal)
      complain("another capture mode");
    clear_fault();
    if (!restoring) check_next_call();
    return found_;
  }

 private:
  // A context that is lost stays lost, if the call needs one.
  void check_next_call() {
    forget_calls();
    const nf4_status status = call_.launch(stream_);
    if (!is_sticky(error_))
      check_success(status);
    else if (!clean_.empty())
      check_failure(status);
  }
  void complain(const std::string &what) {
    found_ += call_.text() + ", " + site_.function + " " + std::to_string(site_.nth) + ", " +
              cudaGetErrorName(error_) + ": " + what + "\n";
  }
  void check_success(nf4_status status) {
    if (status != NF4_STATUS_OK) complain(std::string("then fails, ") + nf4_last_error());
    if (enqueued() != clean_) complain("then enqueues something else:\n" + enqueued());
    for (const std::string &violation : violations()) complain(violation);
  }
  void check_failure(nf4_status status) {
    if (status != status_of(error_)) complain(nf4_status_string(status));
    const std::string detail = nf4_last_error();
    // A runtime of CUDA 13 blames a driver of CUDA 12.
    const bool blames_driver =
        status == NF4_STATUS_NO_DEVICE && detail.rfind("the CUDA driver is for CUDA 12.", 0) == 0;
    if (detail.find(cudaGetErrorName(error_)) == std::string::npos && !blames_driver)
      complain("says " + detail);
    if (!call_.several && !launches().empty()) complain("something is enqueued");
    if (last_error() == cudaSuccess) complain("the error is cleared");
    for (const std::string &violation : violations()) complain(violation);
  }

  const AbiCall &call_;
  const cudaStream_t stream_;
  const std::string &clean_;
  const Site &site_;
  const cudaError_t error_;
  std::string found_;
};

// Returns how many failures there were, all survived.
size_t fail_each_site(const std::vector<AbiCall> &list, cudaStream_t stream) {
  size_t failures = 0, complained = 0;
  for (const AbiCall &call : list) {
    const std::string clean = in_child([&] {
      call.launch(stream);
      return enqueued();
    });
    for (const Site &site : sites_of(call, stream))
      for (const cudaError_t error : kErrors) {
        ++failures;
        const std::string found =
            in_child([&] { return Failure(call, stream, clean, site, error).complaints(); });
        CHECK(found == "");
        complained += found.empty() ? 0 : 1;
      }
  }
  REQUIRE(complained == 0);
  return failures;
}

}  // namespace

TEST_CASE("a call of CUDA that fails is named, nothing is lost, and the next one works",
          "[faults]") {
  size_t failures = 0;
  std::set<const nf4::cuda::GpuFamily *> seen;
  for (const Gpu &gpu : gpus()) {
    if (!seen.insert(nf4::cuda::family_for(gpu.compute_capability)).second) continue;
    INFO("compute capability " << gpu.compute_capability);
    set_gpus({gpu});
    std::vector<AbiCall> list = some_calls();
    for (const AbiCall &query : queries()) list.push_back(query);
    failures += fail_each_site(list, make_stream());
  }
  CHECK(failures > 1000);
  proved("cuda-faults", failures);
}

TEST_CASE("a call of CUDA that fails while another device is current", "[faults]") {
  set_gpus({kT4, best_gpu()});
  std::vector<AbiCall> list = some_calls({MemoryKind::kDevice, 1});
  list.resize(6);
  const size_t failures = fail_each_site(list, make_stream(1));
  CHECK(failures > 300);
  proved("cuda-faults", failures);
}

TEST_CASE("a machine without a driver, and one that gets one", "[faults]") {
  CHECK(in_child([] {
          std::string found;
          set_gpus({});
          for (const AbiCall &call : some_calls())
            if (call.launch(nullptr) != NF4_STATUS_NO_DEVICE ||
                std::string(nf4_last_error()) != "no CUDA driver is installed")
              found += call.text() + ": " + nf4_last_error() + "\n";
          set_gpus({best_gpu()});
          for (const AbiCall &call : some_calls())
            if (call.launch(nullptr) != NF4_STATUS_OK)
              found += call.text() + ": " + nf4_last_error() + "\n";
          return found;
        }) == "");
}

TEST_CASE("a driver that is too old is named", "[faults]") {
  CHECK(in_child([] {
          std::string found;
          set_gpus({best_gpu()});
          set_driver(11040);
          for (const AbiCall &call : some_calls())
            if (call.launch(nullptr) != NF4_STATUS_NO_DEVICE ||
                std::string(nf4_last_error())
                        .rfind("the CUDA driver is for CUDA 11.4; this libnf4 needs one for CUDA 1",
                               0) != 0)
              found += call.text() + ": " + nf4_last_error() + "\n";
          return found;
        }) == "");
}

// Which asks the stream's context for its device.
TEST_CASE("a call of CUDA that fails with a driver of CUDA 12.2", "[faults]") {
  set_gpus({kT4, best_gpu()});
  set_driver(12020);
  std::vector<AbiCall> list = some_calls({MemoryKind::kDevice, 1});
  list.resize(6);
  const size_t failures = fail_each_site(list, make_stream(1));
  CHECK(failures > 300);
  proved("cuda-faults", failures);
}

TEST_CASE("a GPU without kernels is refused", "[faults]") {
  CHECK(in_child([] {
          set_gpus({{70, 80, 96 << 10}});
          std::string found;
          for (const AbiCall &call : some_calls())
            if (call.launch(nullptr) != NF4_STATUS_UNSUPPORTED_DEVICE || !launches().empty() ||
                std::string(nf4_last_error()).find("7.0") == std::string::npos)
              found += call.text() + ": " + nf4_last_error() + "\n";
          return found;
        }) == "");
}
