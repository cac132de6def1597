// Calls of every function of nf4.h that launches, over shapes and kinds, on addresses that no one
// may follow.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "standin_cuda/standin.hpp"

namespace nf4::test::standin {

struct AbiCall {
  const char *function;
  std::string what;  // its shape and kind
  // It enqueues several kernels, so that some may be enqueued though it fails, as nf4.h says.
  bool several;
  std::function<nf4_status(nf4_stream)> launch;
  // Of a batch: how many kernels it will launch on device 0, as its plan says.
  std::function<nf4_status(int &launches)> plan = {};

  std::string text() const { return std::string(function) + ", " + what; }
};

struct Memory {
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;
};

// Of every function, all shapes.
std::vector<AbiCall> all_calls(const Memory &memory = {});
// Of every function, one for each way in which it calls CUDA.
std::vector<AbiCall> some_calls(const Memory &memory = {});
// Any function, of a random shape, alignment and kind.
AbiCall random_call(uint64_t number, const Memory &memory = {});
// Of the functions that call CUDA and launch nothing.
std::vector<AbiCall> queries();

}  // namespace nf4::test::standin
