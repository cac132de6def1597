// main() of the GPU tests. Without a usable GPU all of them are skipped, with the reason.
#include <cstdio>

#include "nf4/nf4.h"
#include "support/run_tests.hpp"

int main(int argc, char **argv) {
  constexpr int kSkipped = 77;  // the status that Meson takes for a skip
  nf4_device device{};
  device.struct_size = sizeof device;
  if (nf4_device_info(0, &device) != NF4_STATUS_OK) {
    std::printf("SKIP: %s\n", nf4_last_error());
    return kSkipped;
  }
  return nf4::test::run_tests(argc, argv);
}
