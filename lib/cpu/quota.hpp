// This finds a limit on processor time, as a container has.
#pragma once

namespace nf4::cpu {

// Returns how many processors' time the groups of this process (cgroups, version 1 or 2) may use,
// rounded up; INT_MAX where none has a limit. `root`, where /proc and /sys are, is "" but in tests.
int processors_of_quota(const char *root);

}  // namespace nf4::cpu
