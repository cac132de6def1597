// Checks the processors that a container's quota allows, read from folders in place of /proc, /sys.
#include <climits>
#include <string>

#include "cpu/parallel.hpp"
#include "cpu/quota.hpp"
#include "support/catch.hpp"
#include "support/checkpoint_files.hpp"

using namespace nf4;

namespace {

// Holds a machine's files, by their paths without the first slash.
class Machine {
 public:
  void file(const std::string &path, const std::string &text) const {
    fs::create_directories(fs::path(root_.path + "/" + path).parent_path());
    root_.write(path, text + "\n");
  }
  int processors() const { return cpu::processors_of_quota(root_.path.c_str()); }

 private:
  Folder root_;
};

}  // namespace

TEST_CASE("without a quota there is no limit", "[threads]") {
  Machine machine;
  CHECK(machine.processors() == INT_MAX);
  machine.file("proc/self/cgroup", "0::/");
  CHECK(machine.processors() == INT_MAX);
  machine.file("sys/fs/cgroup/cpu.max", "max 100000");
  CHECK(machine.processors() == INT_MAX);
  machine.file("proc/self/cgroup", "nonsense\n\n:\n4:memory:/a\n5:cpuset:/");
  CHECK(machine.processors() == INT_MAX);
}

TEST_CASE("a quota of version 2 is that of the group or of one around it, rounded up",
          "[threads]") {
  Machine machine;
  machine.file("proc/self/cgroup", "0::/slice/service");
  machine.file("sys/fs/cgroup/slice/service/cpu.max", "400000 100000");
  CHECK(machine.processors() == 4);
  machine.file("sys/fs/cgroup/slice/cpu.max", "150000 100000");
  CHECK(machine.processors() == 2);
  machine.file("sys/fs/cgroup/cpu.max", "1000 100000");
  CHECK(machine.processors() == 1);
}

TEST_CASE("a quota of version 1 is found where the container does not see its group", "[threads]") {
  Machine machine;
  machine.file("proc/self/cgroup", "11:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/docker/a");
  machine.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1");
  machine.file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  CHECK(machine.processors() == INT_MAX);
  machine.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000");
  CHECK(machine.processors() == 3);
  machine.file("proc/self/cgroup", "4:cpu:/" + std::string(2000, 'a'));
  CHECK(machine.processors() == INT_MAX);
}

TEST_CASE("no more processors are used than the quota of this machine allows", "[threads]") {
  CHECK(cpu::available_processors() >= 1);
  CHECK(cpu::available_processors() <= cpu::processors_of_quota(""));
}
