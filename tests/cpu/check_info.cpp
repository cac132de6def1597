// The facts that the library reports about itself.
#include <cstring>
#include <string>
#include <thread>

#include "nf4/nf4.h"
#include "support/catch.hpp"

TEST_CASE("the version is the header's", "[api]") {
  CHECK(nf4_version() == NF4_VERSION_MAJOR * 10000 + NF4_VERSION_MINOR * 100 + NF4_VERSION_PATCH);
  CHECK(nf4_version_string() == std::to_string(NF4_VERSION_MAJOR) + "." +
                                    std::to_string(NF4_VERSION_MINOR) + "." +
                                    std::to_string(NF4_VERSION_PATCH));
}

TEST_CASE("the build info has its keys", "[api]") {
  const std::string info = std::string("\n") + nf4_build_info();
  for (const char *key : {"\ncompiler: ", "\ncuda: ", "\ncpu_variants: "})
    CHECK(info.find(key) != std::string::npos);
}

TEST_CASE("every status has its name", "[api]") {
  CHECK(nf4_status_string(NF4_STATUS_OK) == std::string("NF4_STATUS_OK"));
  CHECK(nf4_status_string(NF4_STATUS_INVALID_ARGUMENT) ==
        std::string("NF4_STATUS_INVALID_ARGUMENT"));
  CHECK(nf4_status_string(NF4_STATUS_NO_CUDA) == std::string("NF4_STATUS_NO_CUDA"));
  CHECK(nf4_status_string(NF4_STATUS_NO_DEVICE) == std::string("NF4_STATUS_NO_DEVICE"));
  CHECK(nf4_status_string(NF4_STATUS_UNSUPPORTED_DEVICE) ==
        std::string("NF4_STATUS_UNSUPPORTED_DEVICE"));
  CHECK(nf4_status_string(NF4_STATUS_CUDA_ERROR) == std::string("NF4_STATUS_CUDA_ERROR"));
  for (const nf4_status unknown : {-1, 6, 1 << 30})
    CHECK(nf4_status_string(unknown) == std::string("unknown nf4_status"));
}

TEST_CASE("the last error is the thread's own", "[api]") {
  nf4_tensor_sizes(nullptr, nullptr);
  const std::string here = nf4_last_error();
  CHECK(!here.empty());
  std::string there_before;
  std::string there_after;
  std::thread([&] {
    there_before = nf4_last_error();
    nf4_device_info(0, nullptr);
    there_after = nf4_last_error();
  }).join();
  CHECK(there_before == "");
  CHECK(there_after.find("info") != std::string::npos);
  CHECK(nf4_last_error() == here);
}

TEST_CASE("a success leaves the last error", "[api]") {
  nf4_tensor_sizes(nullptr, nullptr);
  const std::string before = nf4_last_error();
  nf4_tensor tensor{};
  tensor.struct_size = sizeof tensor;
  tensor.format = NF4_FORMAT_NF4;
  tensor.blocksize = 64;
  nf4_sizes sizes{};
  sizes.struct_size = sizeof sizes;
  CHECK(nf4_tensor_sizes(&tensor, &sizes) == NF4_STATUS_OK);
  CHECK(nf4_last_error() == before);
}

TEST_CASE("the tables", "[api]") {
  CHECK(nf4_codebook(NF4_FORMAT_NF4)[1] == -0.6961928009986877f);
  CHECK(nf4_codebook(NF4_FORMAT_FP4)[1] == 1.0f / 192);
  CHECK(nf4_codebook(0) == nullptr);
  CHECK(nf4_codebook(5) == nullptr);
  CHECK(nf4_scale_code()[255] == 1);
}

TEST_CASE("device info: bad arguments, and an answer on any machine", "[api]") {
  CHECK(nf4_device_info(0, nullptr) == NF4_STATUS_INVALID_ARGUMENT);
  nf4_device device{};
  CHECK(nf4_device_info(0, &device) == NF4_STATUS_INVALID_ARGUMENT);
  CHECK(std::string(nf4_last_error()).find("struct_size") != std::string::npos);
  device.struct_size = sizeof device;
  const nf4_status status = nf4_device_info(0, &device);
  CHECK(device.struct_size == sizeof device);
  // The driver may be missing; a usable device has a name and kernels.
  CHECK((status == NF4_STATUS_OK) == (device.dequant_variant[0] != '\0'));
  if (status != NF4_STATUS_OK) CHECK(nf4_last_error() != std::string());
  CHECK(nf4_device_info(-1, &device) != NF4_STATUS_OK);
}
