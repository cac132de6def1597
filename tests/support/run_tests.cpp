// Catch2 itself, compiled once for all programs: in version 2 its headers have all of it.
#define CATCH_CONFIG_RUNNER
#include "support/run_tests.hpp"

#include "support/catch.hpp"

int nf4::test::run_tests(int argc, char **argv) { return Catch::Session().run(argc, argv); }
