// Counts the checks of each CPU variant for docs/reliability.md; INFO("variant ...") names the
// variant. If a test failed, each variant that the process tried counts as failed.
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include "support/proofs.hpp"

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
    if (!wanted_) return Returned(true);
    for (const Catch::MessageInfo &info : stats.infoMessages)
      if (info.message.compare(0, kMark.size(), kMark) == 0) {
        const size_t end = info.message.find_first_of(", ", kMark.size());
        ++checks_[info.message.substr(kMark.size(), end - kMark.size())];
      }
    return Returned(true);
  }

  void testRunEnded(const Catch::TestRunStats &stats) override {
    const int64_t failed = stats.totals.assertions.allPassed() ? 0 : 1;
    for (const auto &[variant, count] : checks_)
      nf4::test::proved((kPrefix + variant).c_str(), count, failed);
  }

 private:
  // There are millions of assertions, so this is read once.
  const bool wanted_ = std::getenv("NF4_PROOFS") != nullptr;
  std::map<std::string, int64_t> checks_;
};

CATCH_REGISTER_LISTENER(LeaveCounts)

}  // namespace

void nf4::test::proved(const char *proof, int64_t count, int64_t failed) {
  const char *const path = std::getenv("NF4_PROOFS");
  std::FILE *const file = path == nullptr ? nullptr : std::fopen(path, "a");
  if (file == nullptr) return;
  const std::string line = std::string(proof) + " " + std::to_string(count) +
                           (failed == 0 ? "" : " " + std::to_string(failed)) + "\n";
  std::fputs(line.c_str(), file);
  std::fclose(file);
}
