// What a test leaves for docs/reliability.md: lines in the file that NF4_PROOFS names.
#pragma once

#include <cstdint>

namespace nf4::test {

// That a proof counted so much, of which some failed; nothing where NF4_PROOFS is unset.
void proved(const char *proof, int64_t count, int64_t failed = 0);

}  // namespace nf4::test
