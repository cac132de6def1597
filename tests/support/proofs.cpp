// The checks made of each CPU variant, which their INFO("variant ...") tells, for
// docs/reliability.md: lines in the file that NF4_PROOFS names, where all tests passed.
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "support/catch.hpp"

namespace {

#if defined __SANITIZE_ADDRESS__
const std::string kPrefix = "sanitized-";
#elif defined __aarch64__
const std::string kPrefix = "arm-";
#else
const std::string kPrefix = "cpu-";
#endif
const std::string kMark = "variant ";

#if defined NF4_CATCH2_HEADERS || !__has_include(<catch2/catch_all.hpp>)
using Listener = Catch::TestEventListenerBase;
using Returned = bool;
#else
using Listener = Catch::EventListenerBase;
using Returned = void;
#endif

struct LeaveCounts : Listener {
  using Listener::Listener;

  Returned assertionEnded(const Catch::AssertionStats &stats) override {
    for (const Catch::MessageInfo &info : stats.infoMessages)
      if (info.message.compare(0, kMark.size(), kMark) == 0) {
        const size_t end = info.message.find_first_of(", ", kMark.size());
        ++checks_[info.message.substr(kMark.size(), end - kMark.size())];
      }
    return Returned(true);
  }

  void testRunEnded(const Catch::TestRunStats &stats) override {
    const char *path = std::getenv("NF4_PROOFS");
    if (path == nullptr || !stats.totals.assertions.allPassed()) return;
    std::string lines;
    for (const auto &[variant, count] : checks_)
      lines += kPrefix + variant + " " + std::to_string(count) + "\n";
    std::FILE *file = std::fopen(path, "a");
    if (file == nullptr) return;
    std::fputs(lines.c_str(), file);
    std::fclose(file);
  }

 private:
  std::map<std::string, long> checks_;
};

CATCH_REGISTER_LISTENER(LeaveCounts)

}  // namespace
