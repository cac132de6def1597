// Reads the limits of cgroups. A group's limit is two numbers: microseconds of processor time, and
// the period for which they hold. The limits of the groups around it apply, too. Nothing is
// allocated.
#include "cpu/quota.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace nf4::cpu {
namespace {

constexpr size_t kPathBytes = 1024, kGroupsBytes = 16384;

// Reads the beginning of a file as a string; it is "" if the file cannot be read.
void read_file(const char *path, char *text, size_t bytes) {
  ssize_t count = 0;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file >= 0) {
    count = std::max<ssize_t>(0, read(file, text, bytes - 1));
    close(file);
  }
  text[count] = '\0';
}

// The numbers of a file in a group's folder; 0 if there are none. "max" is not a number.
struct Numbers {
  long long first = 0, second = 0;

  Numbers(const char *folder, const char *name) {
    char path[kPathBytes + 32], text[64];
    std::snprintf(path, sizeof path, "%s/%s", folder, name);
    read_file(path, text, sizeof text);
    char *end = text;
    first = std::strtoll(text, &end, 10);
    second = std::strtoll(end, nullptr, 10);
  }
};

int limit_of(const char *folder) {
  const Numbers both(folder, "cpu.max");
  long long time = both.first, period = both.second;
  if (period <= 0) {
    time = Numbers(folder, "cpu.cfs_quota_us").first;
    period = Numbers(folder, "cpu.cfs_period_us").first;
  }
  if (time <= 0 || period <= 0) return INT_MAX;
  return static_cast<int>(std::min<long long>((time - 1) / period + 1, INT_MAX));
}

// Returns the least limit of a group and those around it. A container may not see the groups above
// its own.
int least_limit(const char *root, const char *mount, const char *group) {
  char folder[kPathBytes];
  const int top = std::snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s", root, mount);
  const int bytes = top + std::snprintf(folder + top, sizeof folder - top, "%s", group);
  if (bytes >= static_cast<int>(sizeof folder)) return INT_MAX;
  int least = limit_of(folder);
  for (char *end = folder + bytes; end-- > folder + top;) {
    if (*end != '/') continue;
    *end = '\0';
    least = std::min(least, limit_of(folder));
  }
  return least;
}

}  // namespace

int processors_of_quota(const char *root) {
  char path[kPathBytes], groups[kGroupsBytes];
  std::snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
  read_file(path, groups, sizeof groups);
  int least = INT_MAX;
  // Lines have forms such as 0::/a/b (version 2) and 4:cpu,cpuacct:/a/b (version 1).
  char *rest = groups;
  while (char *line = strsep(&rest, "\n")) {
    strsep(&line, ":");
    const char *controllers = strsep(&line, ":");
    if (line == nullptr) continue;
    if (*controllers == '\0') least = std::min(least, least_limit(root, "", line));
    if (std::strcmp(controllers, "cpu") == 0 || std::strncmp(controllers, "cpu,", 4) == 0)
      least = std::min(least, least_limit(root, "/cpu", line));
  }
  return least;
}

}  // namespace nf4::cpu
