// A main() of tests calls this.
#pragma once

namespace nf4::test {

int run_tests(int argc, char **argv);

}  // namespace nf4::test
