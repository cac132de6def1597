// main() for Catch2 version 2; version 3 has its own in a library.
#if defined NF4_CATCH2_HEADERS || !__has_include(<catch2/catch_all.hpp>)
#include "support/run_tests.hpp"

int main(int argc, char **argv) { return nf4::test::run_tests(argc, argv); }
#endif
