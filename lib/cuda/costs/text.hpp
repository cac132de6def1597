// The first line of a text of costs, which names the version of the library.
#pragma once

#include "nf4/nf4.h"

#define NF4_TEXT_(x) #x
#define NF4_TEXT(x) NF4_TEXT_(x)
#define NF4_COSTS_FIRST_LINE                                                               \
  "nf4-costs 1 " NF4_TEXT(NF4_VERSION_MAJOR) "." NF4_TEXT(NF4_VERSION_MINOR) "." NF4_TEXT( \
      NF4_VERSION_PATCH)
