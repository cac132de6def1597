// As much JSON as config.json and the header of a safetensors file need.
#pragma once

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

struct Json {
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json, std::less<>>;
  std::variant<std::nullptr_t, bool, double, std::string, Array, Object> value;

  // The value of a key; NULL if this is no object, or has no such key, or null there.
  const Json *find(std::string_view key) const {
    const auto *object = std::get_if<Object>(&value);
    if (!object) return nullptr;
    const auto found = object->find(key);
    const bool none = found == object->end() || found->second.value.index() == 0;
    return none ? nullptr : &found->second;
  }
  // This value as a T: double, bool, std::string, Array or Object.
  template <class T>
  const T &as(std::string_view name) const {
    if (const T *typed = std::get_if<T>(&value)) return *typed;
    throw std::runtime_error(std::string(name) + " is of another type");
  }
  template <class T>
  const T &get(std::string_view key) const {
    if (const Json *member = find(key)) return member->as<T>(key);
    throw std::runtime_error(std::string(key) + " is missing");
  }
  template <class T>
  T get_or(std::string_view key, T otherwise) const {
    return find(key) ? get<T>(key) : otherwise;
  }
};

class JsonParser {
 public:
  static Json parse(std::string_view text) { return JsonParser(text).value(0); }

 private:
  explicit JsonParser(std::string_view text) : text_(text) {}

  // Skips white space, then `c` if it comes next.
  bool skip(char c) {
    const size_t next = text_.find_first_not_of(" \t\r\n");
    text_.remove_prefix(next == text_.npos ? text_.size() : next);
    if (text_.empty() || text_[0] != c) return false;
    text_.remove_prefix(1);
    return true;
  }
  void expect(bool good) const {
    if (!good) throw std::runtime_error("not JSON at '" + std::string(text_.substr(0, 20)) + "'");
  }

  Json value(int depth) {
    expect(depth < 32);
    if (skip('{')) {
      Json::Object object;
      for (bool more = !skip('}'); more; more = skip(',') || (expect(skip('}')), false)) {
        expect(skip('"'));
        std::string key = string();
        expect(skip(':'));
        object[std::move(key)] = value(depth + 1);
      }
      return {std::move(object)};
    }
    if (skip('[')) {
      Json::Array array;
      for (bool more = !skip(']'); more; more = skip(',') || (expect(skip(']')), false))
        array.push_back(value(depth + 1));
      return {std::move(array)};
    }
    if (skip('"')) return {string()};
    for (const auto &[word, meaning] : {std::pair<std::string_view, Json>{"null", {nullptr}},
                                        {"true", {true}},
                                        {"false", {false}}})
      if (text_.substr(0, word.size()) == word) return text_.remove_prefix(word.size()), meaning;
    const std::string number(text_.substr(0, 40));
    char *end = nullptr;
    const double parsed = std::strtod(number.c_str(), &end);
    expect(end != number.c_str());
    text_.remove_prefix(end - number.c_str());
    return {parsed};
  }

  // Up to the closing quote; names of tensors need no escapes, so \u stays as it is.
  std::string string() {
    std::string result;
    for (; !text_.empty() && text_[0] != '"'; text_.remove_prefix(1)) {
      if (text_[0] == '\\' && text_.size() > 1 && text_[1] != 'u') text_.remove_prefix(1);
      result += text_[0];
    }
    expect(skip('"'));
    return result;
  }

  std::string_view text_;
};
