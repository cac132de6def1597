// Finds the limit on the processor time of a container.
#pragma once

namespace nf4::cpu {

// Returns how many processors' time the groups of this process (cgroups, version 1 or 2) may use,
// rounded up; INT_MAX if none has a limit. `root` is the folder of /proc and /sys, "" except in
// tests.
int processors_of_quota(const char *root);

}  // namespace nf4::cpu
