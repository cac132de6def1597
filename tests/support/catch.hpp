// Catch2, version 2 or 3; the headers that the option catch2_include names are of version 2.
#pragma once

#if !defined NF4_CATCH2_HEADERS && __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
