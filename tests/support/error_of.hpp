// The errors that the C++ headers throw.
#pragma once

#include <nf4/json.hpp>
#include <string>

#include "support/catch.hpp"

// Returns the text of the error; "" if nothing is thrown.
template <class Function>
inline std::string error_of(Function function) {
  try {
    function();
  } catch (const nf4::Error &error) {
    return error.what();
  }
  return "";
}
inline bool has(const std::string &text, const std::string &part) {
  INFO(text);
  const bool found = text.find(part) != text.npos;
  CHECK(found);
  return found;
}
