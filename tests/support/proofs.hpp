// Records of a test for docs/reliability.md: lines in the file that NF4_PROOFS names.
#pragma once

#include <cstdint>

namespace nf4::test {

// Records that a proof made this many checks, some of which failed. Does nothing if NF4_PROOFS is
// unset.
void proved(const char *proof, int64_t count, int64_t failed = 0);

}  // namespace nf4::test
