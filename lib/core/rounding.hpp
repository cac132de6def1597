// Moved to formats.hpp; for the includes of lib/cuda.
#pragma once

#include "core/formats.hpp"
