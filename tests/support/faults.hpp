// Calls that are wrong in one way each, and what the library says of them.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <string>
#include <vector>

#include "nf4/nf4.h"
#include "support/catch.hpp"
#include "support/guarded.hpp"

namespace nf4::test {

// The calls that a fault concerns: bits of three groups. A group without a bit means all of it.
enum Who {
  kAll = 0,
  // The function's operation.
  kDequant = 1,
  kQuantize = 2,
  kMultiply = 4,
  kReorder = 8,
  kGradient = 16,
  kWork = 31,
  // Where it works.
  kCpu = 32,
  kLaunch = 64,
  kMemory = 96,
  // The kind of the weight.
  kFlat = 128,
  kNested = 256,
  kGptq = 512,
  kAwq = 1024,
  kCompressed = 2048,
  kIntegers = kGptq | kAwq | kCompressed,
  kForm = kFlat | kNested | kIntegers,
};

// A function, and how it is called with the arguments of a Call.
template <class Call>
struct Function {
  const char *name;
  int who;
  nf4_status (*call)(Call &);

  bool launches() const { return (who & kLaunch) != 0; }
};

// One way to break a call, and a phrase of the detail, in which 0x stands for any address.
template <class Call>
struct Fault {
  int who;
  void (*change)(Call &);
  std::string detail;
};

inline bool concerns(int fault, int call) {
  for (const int group : {kWork, kMemory, kForm})
    if ((fault & group) != 0 && (fault & call & group) == 0) return false;
  return true;
}

inline float *floats(const GuardedBuffer &buffer) {
  return reinterpret_cast<float *>(buffer.data());
}
inline int32_t *integers(const GuardedBuffer &buffer) {
  return reinterpret_cast<int32_t *>(buffer.data());
}

template <class T>
T *moved(T *pointer, int bytes) {
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(pointer) + bytes);
}

// Checks that nf4_last_error() begins with the phrase, of whole words. Functions of several
// products may say first which one it is.
inline void check_last_error(const std::string &phrase, bool batch = false) {
  std::string error = nf4_last_error();
  INFO("nf4_last_error(): " << error);
  for (size_t at = 0; (at = error.find("0x", at)) != error.npos;) {
    at += 2;
    error.erase(at, error.find_first_not_of("0123456789abcdef", at) - at);
  }
  if (batch && error.rfind("product ", 0) == 0 && phrase.rfind("product ", 0) != 0)
    error.erase(0, error.find(": ") + 2);
  if (batch && error.rfind("the array of ", 0) == 0) error.replace(0, 13, "the ");
  CHECK(error.rfind(phrase, 0) == 0);
  const auto in_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
  };
  const char next = error.c_str()[std::min(phrase.size(), error.size())];
  CHECK_FALSE((in_word(phrase.back()) && in_word(next)));
}

// Every function that a fault concerns answers INVALID_ARGUMENT, names it, and writes nothing.
// Call::functions() lists the functions, Call::kForms the weights that its constructor makes.
template <class Call>
void check_faults(const std::vector<Fault<Call>> &faults) {
  for (const Fault<Call> &fault : faults) {
    int calls = 0;
    for (const Function<Call> &function : Call::functions())
      for (const int form : Call::kForms) {
        if (!concerns(fault.who, function.who | form)) continue;
        INFO(function.name << ", form " << form << ": " << fault.detail);
        Call call(function.who | form);
        fault.change(call);
        CHECK(function.call(call) == NF4_STATUS_INVALID_ARGUMENT);
        check_last_error(fault.detail,
                         std::string(function.name).find("batch") != std::string::npos);
        CHECK(call.untouched());
        ++calls;
      }
    INFO(fault.detail);
    CHECK(calls > 0);
  }
}

// Without a fault the functions of the CPU do their work. Launches get host memory: CUDA is not
// there, there is no GPU, or the pointers are to blame.
template <class Call>
void check_right_calls(void (*prepare)(Call &)) {
  for (const Function<Call> &function : Call::functions())
    for (const int form : Call::kForms) {
      INFO(function.name << ", form " << form);
      Call call(function.who | form);
      prepare(call);
      const nf4_status status = function.call(call);
      CHECK((status == NF4_STATUS_OK) == !function.launches());
      CHECK(call.untouched() == function.launches());
      if (function.launches()) CHECK(nf4_last_error() != std::string());
    }
}

}  // namespace nf4::test
