// As much JSON as config.json and the header of a safetensors file need, flattened: the text of
// each string, number, true and false by its path, such as "rope_scaling/factor" or "shape/0".
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

// Throws what is wrong, in parts.
template <class... Parts>
void require(bool good, const Parts &...parts) {
  if (good) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

class Json {
 public:
  Json(std::string name, std::string_view text) : name_(std::move(name)), rest_(text) {
    value("", 0);
    skip(' ');
    expect(rest_.empty());
  }
  const std::map<std::string, std::string> &values() const { return values_; }
  // null is as if it were not there.
  bool has(const std::string &path) const { return values_.count(path) != 0; }
  const std::string &text(const std::string &path) const {
    require(has(path), name_, ": ", path, " is missing");
    return values_.at(path);
  }
  double number(const std::string &path) const {
    char *end = nullptr;
    const double number = std::strtod(text(path).c_str(), &end);
    require(*end == 0 && end != text(path).c_str(), name_, ": ", path, " is ", text(path));
    return number;
  }
  int64_t size(const std::string &path) const {
    const double size = number(path);
    require(0 <= size && size < 1e15, name_, ": ", path, " is ", text(path));
    return static_cast<int64_t>(size);
  }
  double number(const std::string &path, double otherwise) const {
    return has(path) ? number(path) : otherwise;
  }

 private:
  void expect(bool good) const {
    require(good, name_, ": not JSON at '", rest_.substr(0, 20), "'");
  }
  // Skips white space, then `c` if it comes next.
  bool skip(char c) {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\r\n"), rest_.size()));
    const bool found = !rest_.empty() && rest_[0] == c;
    if (found) rest_.remove_prefix(1);
    return found;
  }
  bool another(char end) {
    if (skip(',')) return true;
    expect(skip(end));
    return false;
  }
  void value(const std::string &path, int depth) {
    expect(depth < 16);
    const auto inside = [&](const std::string &key) {
      return path.empty() ? key : path + "/" + key;
    };
    if (skip('{')) {
      for (bool more = !skip('}'); more; more = another('}')) {
        expect(skip('"'));
        const std::string key = string();
        expect(skip(':'));
        value(inside(key), depth + 1);
      }
    } else if (skip('[')) {
      int64_t count = 0;
      for (bool more = !skip(']'); more; more = another(']'))
        value(inside(std::to_string(count++)), depth + 1);
    } else if (skip('"')) {
      values_[path] = string();
    } else {
      const std::string word(rest_.substr(0, rest_.find_first_of(",]} \t\r\n")));
      expect(!word.empty());
      rest_.remove_prefix(word.size());
      if (word != "null") values_[path] = word;
    }
  }
  // Up to the closing quote. Of escapes only \" and \\ are right; names need no others.
  std::string string() {
    std::string result;
    for (; !rest_.empty() && rest_[0] != '"'; rest_.remove_prefix(1)) {
      if (rest_[0] == '\\' && rest_.size() > 1) rest_.remove_prefix(1);
      result += rest_[0];
    }
    expect(skip('"'));
    return result;
  }

  std::string name_;
  std::string_view rest_;
  std::map<std::string, std::string> values_;
};
