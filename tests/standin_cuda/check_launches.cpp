// How launches use CUDA, on GPUs of all kinds, none of which is there: the caller's stream and
// device, no call that waits or allocates, nothing that a GPU or a capture refuses.
#include <cudaTypedefs.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <set>
#include <thread>

#include "standin_cuda/abi_calls.hpp"
#include "standin_cuda/child.hpp"
#include "standin_cuda/machines.hpp"
#include "support/catch.hpp"

using namespace nf4::test::standin;

namespace {

// What a launch that should succeed on `device` did wrong, a line each.
std::string complaints(const AbiCall &call, cudaStream_t stream, int device) {
  std::string found;
  const auto complain = [&](const std::string &what) { found += call.text() + ": " + what + "\n"; };
  forget_calls();
  const int current = current_device();
  if (const nf4_status status = call.launch(stream))
    complain(std::string(nf4_status_string(status)) + ", " + nf4_last_error());
  for (const std::string &violation : violations()) complain(violation);
  if (launches().empty()) complain("nothing is enqueued");
  if (!call.several && launches().size() > 1) complain("several kernels are enqueued");
  for (const Launched &each : launches())
    if (each.device != device) complain("enqueued on device " + std::to_string(each.device));
  for (const Call &each : calls())
    if (each.on_stream && each.stream != stream)
      complain(std::string(each.function) + " on another stream");
  if (current_device() != current) complain("another device is current");
  if (capture_mode() != cudaStreamCaptureModeGlobal) complain("another capture mode");
  if (last_error() != cudaSuccess) complain("leaves an error");
  return found;
}

std::string captured(const AbiCall &call, cudaStream_t stream, int device) {
  begin_capture(stream);
  std::string found = complaints(call, stream, device);
  if (!end_capture()) found += call.text() + ": ends a capture\n";
  return found;
}

// On each kind of stream and in a capture, and that all enqueue the same.
std::string complaints_of_streams(const AbiCall &call, cudaStream_t stream) {
  std::string found = complaints(call, stream, 0);
  const std::string first = enqueued();
  for (const cudaStream_t other : {cudaStream_t{}, cudaStreamLegacy, cudaStreamPerThread}) {
    found += complaints(call, other, 0);
    if (enqueued() != first) found += call.text() + ": another choice\n";
  }
  found += captured(call, stream, 0);
  if (enqueued() != first) found += call.text() + ": another choice in a capture\n";
  return found;
}

}  // namespace

TEST_CASE("every function that launches is called", "[standin]") {
  std::set<std::string> called, exported;
  for (const AbiCall &call : some_calls()) called.insert(call.function);
  std::ifstream symbols(NF4_SYMBOLS);
  for (std::string name; symbols >> name;)
    if (name.find("_launch") != std::string::npos) exported.insert(name);
  CHECK(exported.size() > 10);
  CHECK(called == exported);
}

TEST_CASE("launches use the caller's stream, and choose the same every time", "[standin]") {
  set_gpus({best_gpu()});
  forget_calls();
  const std::vector<AbiCall> list = all_calls();
  CHECK(calls().empty());  // workspace sizes ask no GPU
  std::string found;
  for (const Gpu &gpu : gpus())
    found += in_child([&] {
      set_gpus({gpu});
      std::string wrong;
      for (const AbiCall &call : list) wrong += complaints_of_streams(call, make_stream());
      return wrong;
    });
  REQUIRE(found == "");
  proved("cuda-launches", gpus().size() * list.size() * 5);
}

TEST_CASE("launches of random shapes, alignments and kinds", "[standin]") {
  constexpr int kCalls = 10000;
  std::string found;
  for (const Gpu &gpu : gpus())
    found += in_child([&] {
      set_gpus({gpu});
      std::string wrong;
      for (int i = 0; i < kCalls; ++i)
        wrong += complaints_of_streams(random_call(i), make_stream());
      return wrong;
    });
  REQUIRE(found == "");
  proved("cuda-launches", gpus().size() * kCalls * 5);
}

TEST_CASE("the first launch of a process is captured, and of a new context", "[standin]") {
  std::string found;
  size_t count = 0;
  for (const Gpu &gpu : gpus()) {
    set_gpus({gpu});
    for (const AbiCall &call : some_calls()) {
      count += 2;
      found += in_child([&] {
        const std::string wrong = captured(call, make_stream(), 0);
        reset_contexts();
        return wrong + captured(call, make_stream(), 0);
      });
    }
  }
  REQUIRE(found == "");
  proved("cuda-captures", count);
}

TEST_CASE("the memory's device is used, and the current one stays", "[standin]") {
  const std::vector<AbiCall> of_device = some_calls({MemoryKind::kDevice, 1});
  const std::vector<AbiCall> managed = some_calls({MemoryKind::kManaged});
  const std::vector<AbiCall> pinned = some_calls({MemoryKind::kPinned});
  for (const Gpu &other : gpus())
    for (const int driver : kDrivers)
      REQUIRE(in_child([&] {
                set_gpus({other, best_gpu()});
                set_driver(driver);
                const cudaStream_t of_0 = make_stream(0), of_1 = make_stream(1);
                std::string found;
                for (const AbiCall &call : of_device) {
                  found += complaints(call, of_1, 1);
                  found += captured(call, of_1, 1);
                  begin_capture(of_0);  // which is none of the launch's
                  found += complaints(call, of_1, 1);
                  if (!end_capture()) found += call.text() + ": ends another stream's capture\n";
                }
                for (const std::vector<AbiCall> *list : {&managed, &pinned})
                  for (const AbiCall &call : *list) found += complaints(call, of_1, 1);
                return found;
              }) == "");
  proved("cuda-devices", std::size(kDrivers) * gpus().size() *
                             (3 * of_device.size() + managed.size() + pinned.size()));
}

TEST_CASE("a stream of another device than the memory's is refused", "[standin]") {
  CHECK(in_child([] {
          set_gpus({best_gpu(), best_gpu()});
          const cudaStream_t of_0 = make_stream(0);
          std::string found;
          for (const AbiCall &call : some_calls({MemoryKind::kDevice, 1}))
            if (call.launch(of_0) != NF4_STATUS_INVALID_ARGUMENT || !launches().empty())
              found += call.text() + "\n";
          return found;
        }) == "");
}

TEST_CASE("every driver from CUDA 12.0 on gets the same launches", "[standin]") {
  for (const Gpu &gpu : gpus()) {
    std::set<std::string> found;
    for (const int driver : kDrivers)
      found.insert(in_child([&] {
        set_gpus({gpu});
        set_driver(driver);
        std::string wrong, launched;
        for (const AbiCall &call : some_calls()) {
          wrong += complaints_of_streams(call, make_stream());
          launched += enqueued();
        }
        return wrong.empty() ? launched : "wrong: " + wrong;
      }));
    CHECK(found.size() == 1);
    CHECK(found.begin()->rfind("wrong", 0) != 0);
  }
}

// The driver's functions that the runtime calls for its own, as a runtime of CUDA 12.9 looks them
// up. The types are those of NVIDIA's headers, by the version of CUDA that brought the function.
TEST_CASE("the runtime's functions need no driver newer than CUDA 12.0", "[standin]") {
  struct Row {
    const char *function;
    int since;
  };
#define NEEDS(function, version, name) \
  Row { #function, (static_cast<void>(PFN_##name##_v##version{}), version) }
  const Row rows[] = {
      NEEDS(cudaDeviceGetAttribute, 2000, cuDeviceGetAttribute),
      NEEDS(cudaDriverGetVersion, 2020, cuDriverGetVersion),
      NEEDS(cudaFuncGetAttributes, 12000, cuKernelGetAttribute),
      NEEDS(cudaFuncSetAttribute, 12000, cuKernelSetAttribute),
      NEEDS(cudaGetDevice, 4000, cuCtxGetCurrent),
      NEEDS(cudaGetDeviceCount, 2000, cuDeviceGetCount),
      NEEDS(cudaGetDeviceProperties, 2000, cuDeviceGetAttribute),
      NEEDS(cudaGetDriverEntryPointByVersion, 12000, cuGetProcAddress),
      NEEDS(cudaLaunchKernelExC, 11060, cuLaunchKernelEx),
      NEEDS(cudaOccupancyMaxActiveClusters, 11070, cuOccupancyMaxActiveClusters),
      NEEDS(cudaSetDevice, 7000, cuDevicePrimaryCtxRetain),
      NEEDS(cudaStreamIsCapturing, 10000, cuStreamIsCapturing),
      NEEDS(cudaThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode),
  };
#undef NEEDS
  std::set<std::string> known;
  for (const Row &row : rows) {
    CHECK(row.since <= kOldestDriver);
    known.insert(row.function);
  }
  for (const Gpu &gpu : gpus())
    CHECK(in_child([&] {
            set_gpus({best_gpu(), gpu});
            std::vector<AbiCall> list = some_calls({MemoryKind::kDevice, 1});
            for (const AbiCall &query : queries()) list.push_back(query);
            const cudaStream_t stream = make_stream(1);
            for (const AbiCall &call : list) call.launch(stream);
            std::string unknown;
            for (const Call &call : calls()) {
              const std::string function = call.function;
              if (function.rfind("cuda", 0) == 0 && known.count(function) == 0)
                unknown += function + "\n";
            }
            return calls().empty() ? "nothing is called" : unknown;
          }) == "");
}

TEST_CASE("host memory is refused, but in a capture, which may have allocated it", "[standin]") {
  for (const Gpu &gpu : gpus())
    CHECK(in_child([&] {
            set_gpus({gpu});
            const cudaStream_t stream = make_stream();
            std::string found;
            for (const AbiCall &call : some_calls({MemoryKind::kHost})) {
              forget_calls();
              const bool refused = call.launch(stream) == NF4_STATUS_INVALID_ARGUMENT;
              const std::string why = nf4_last_error();
              if (!refused || why.find("is host memory") == std::string::npos ||
                  !launches().empty())
                found += call.text() + ": not refused, " + why + "\n";
              found += captured(call, stream, 0);
            }
            return found;
          }) == "");
}

TEST_CASE("the first launch of many threads at once", "[standin]") {
  constexpr int kThreads = 16;
  size_t count = 0;
  for (const Gpu &gpu : gpus()) {
    set_gpus({gpu});
    for (const AbiCall &call : some_calls()) {
      count += kThreads;
      REQUIRE(in_child([&] {
                set_yielding(true);
                std::atomic<int> waiting{kThreads}, refused{0};
                std::vector<std::thread> threads;
                for (int i = 0; i < kThreads; ++i)
                  threads.emplace_back([&] {
                    for (--waiting; waiting > 0;) std::this_thread::yield();
                    refused += call.launch(nullptr) != NF4_STATUS_OK;
                  });
                for (std::thread &thread : threads) thread.join();
                std::string found = refused == 0 ? "" : call.text() + ": refused\n";
                for (const std::string &violation : violations()) found += violation + "\n";
                return found;
              }) == "");
    }
  }
  proved("cuda-threads", count);
}

TEST_CASE("a plan names as many launches as there are", "[standin]") {
  for (const Gpu &gpu : gpus())
    CHECK(in_child([&] {
            set_gpus({gpu});
            std::string found;
            for (const AbiCall &call : all_calls()) {
              if (!call.plan) continue;
              forget_calls();
              int planned = 0;
              if (call.plan(planned) != NF4_STATUS_OK || !launches().empty())
                found += call.text() + ": its plan, " + nf4_last_error() + "\n";
              found += complaints(call, make_stream(), 0);
              if (static_cast<int>(launches().size()) != planned)
                found += call.text() + ": planned " + std::to_string(planned) + "\n";
            }
            return found;
          }) == "");
}
