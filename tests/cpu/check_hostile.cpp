// The folders of tests/support/hostile_folders.py, which the readers in Python and Rust see, too.
#include <algorithm>
#include <chrono>
#include <nf4/checkpoint.hpp>
#include <string>

#include "support/catch.hpp"
#include "support/checkpoint_files.hpp"
#include "support/error_of.hpp"

namespace {

// The text that a folder is refused with. A reader that waits, or reads a device, never ends.
std::string refusal(const std::string &folder) {
  const auto began = std::chrono::steady_clock::now();
  const std::string error = error_of([&] {
    const nf4::Checkpoint checkpoint(folder);
    for (const auto &[name, tensor] : checkpoint.tensors())
      if (checkpoint.is_nf4(name)) checkpoint.nf4_weight(name);
  });
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(20));
  return error;
}

}  // namespace

TEST_CASE("hostile folders are refused, and others read", "[checkpoint]") {
  const Folder made;
  const std::string command =
      "'" NF4_TEST_PYTHON "' '" NF4_TEST_HOSTILE "' '" + made.path + "/folders'";
  REQUIRE(std::system(command.c_str()) == 0);
  int refused = 0;
  for (const char *verdict : {"read", "refused", "refused_config"})
    for (const auto &entry : fs::directory_iterator(made.path + "/folders/" + verdict)) {
      const std::string error = refusal(entry.path());
      INFO(entry.path() << ": " << error);
      const bool is_refused = !error.empty();
      CHECK(is_refused == (verdict != std::string("read")));
      CHECK(std::none_of(error.begin(), error.end(), [](char c) { return c >= 0 && c < ' '; }));
      CHECK(error.find("\u009b") == error.npos);
      CHECK(error.find("\u202e") == error.npos);
      refused += is_refused;
    }
  CHECK(refused > 100);
}
