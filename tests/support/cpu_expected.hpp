// The expected result of a matmul on the CPU, computed naively in binary64: the numbers of
// matmul_expected.hpp that cpu_tolerance.hpp reads, to the bit. A row of the weight is decoded once
// for all rows of x.
#pragma once

#include <vector>

#include "support/matmul_cases.hpp"
#include "support/matmul_expected.hpp"

namespace nf4::test {

// All of y, [m][rows], of a case whose weight is at these addresses, in host memory.
template <class Host>
std::vector<Expected> expect_all(const MatmulCaseOf<Host> &test,
                                 const typename Host::Tensor &weight);

}  // namespace nf4::test
