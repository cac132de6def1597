// main() for Catch2 version 2; version 3 has its own in a library.
#if defined NF4_CATCH2_HEADERS || !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
#endif
