// The headers that most tests include, compiled once: a second less for each of their files.
#define CATCH_CONFIG_EXTERNAL_INTERFACES  // for proofs.cpp
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "support/catch.hpp"
