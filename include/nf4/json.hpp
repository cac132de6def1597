// The JSON of checkpoints, for checkpoint.hpp and for an engine's own configuration: a header
// alone, in C++17, on the standard library.
#ifndef NF4_JSON_HPP
#define NF4_JSON_HPP

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <locale>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nf4 {

class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws an Error whose text is that of the parts, if not `good`.
template <class... Parts>
void require(bool good, const Parts &...parts) {
  if (good) return;
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

// Of a tensor.
using Shape = std::vector<int64_t>;

inline std::string text(const Shape &shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// A value of JSON. What is in it goes by its path, such as "rope_scaling/factor" or "shape/0"; null
// is as nothing. Where there is nothing, functions return `otherwise` if that is given, and throw
// as they do where there is something else. Escapes but \" \\ and \/ stay as they are written.
struct Json {
  std::string name;                     // in errors
  std::string word;                     // as it is written; of an object "{}", of an array "[]"
  std::map<std::string, Json> members;  // of an array: by number

  Json() = default;
  // Throws for what is no JSON, a key that is there twice, and beyond 64 levels or 4 million
  // values.
  Json(std::string title, std::string_view rest) : name(std::move(title)) {
    int64_t values = 0;
    parse(*this, rest, 0, values);
    skip(rest, ' ');
    expect(rest.empty(), rest);
  }

  bool has(std::string_view path) const { return find(path) != nullptr; }
  std::string text(const std::string &path, std::optional<std::string> otherwise = {}) const {
    return read(path, otherwise, [](const std::string &found, std::string &value) {
      if (found[0] == '"') value = found.substr(1, found.size() - 2);
      return found[0] == '"';
    });
  }
  // A text that is one of `choices`.
  std::string choice(const std::string &path, const std::vector<std::string> &choices,
                     std::optional<std::string> otherwise = {}) const {
    const std::string found = text(path, std::move(otherwise));
    std::string all;
    for (const std::string &each : choices) all += (all.empty() ? "" : ", ") + each;
    require(std::count(choices.begin(), choices.end(), found), name, ": ", path, " is ", found,
            "; expected: ", all);
    return found;
  }
  double number(const std::string &path, std::optional<double> otherwise = {}) const {
    return read(path, otherwise, [](const std::string &found, double &value) {
      std::istringstream digits(found);
      digits.imbue(std::locale::classic());
      return (digits >> value) && digits.eof() && found.find('x') == found.npos;
    });
  }
  // A whole number, 0 to `largest`.
  int64_t size(const std::string &path, std::optional<int64_t> otherwise = {},
               int64_t largest = INT64_MAX) const {
    return read(path, otherwise, [largest](const std::string &found, int64_t &value) {
      const char *const end = found.data() + found.size();
      const auto [stop, error] = std::from_chars(found.data(), end, value);
      return error == std::errc() && stop == end && 0 <= value && value <= largest;
    });
  }
  // An array of those.
  Shape sizes(const std::string &path) const {
    const Json *array = find(path);
    require(array && array->word == "[]", name, ": ", path, " is no array");
    Shape values;
    for (size_t i = 0; i < array->members.size(); ++i)
      values.push_back(size(path + "/" + std::to_string(i)));
    return values;
  }
  bool flag(const std::string &path, std::optional<bool> otherwise = {}) const {
    return read(path, otherwise, [](const std::string &found, bool &value) {
      value = found == "true";
      return value || found == "false";
    });
  }

 private:
  const Json *find(std::string_view path) const {
    const Json *found = this;
    while (found && !path.empty()) {
      const size_t end = std::min(path.find('/'), path.size());
      const auto member = found->members.find(std::string(path.substr(0, end)));
      if (end > 0) found = member == found->members.end() ? nullptr : &member->second;
      path.remove_prefix(std::min(end + 1, path.size()));
    }
    return found && found->word != "null" ? found : nullptr;
  }
  template <class T, class Read>
  T read(const std::string &path, const std::optional<T> &otherwise, Read read) const {
    const Json *found = find(path);
    if (!found && otherwise) return *otherwise;
    require(found, name, ": ", path, " is missing");
    T value{};
    require(read(found->word, value), name, ": ", path, " is ", found->word);
    return value;
  }
  void expect(bool good, std::string_view rest) const {
    require(good, name, ": not JSON at '", rest.substr(0, 20), "'");
  }
  // Skips white space, then `c` if it comes next.
  static bool skip(std::string_view &rest, char c) {
    rest.remove_prefix(std::min(rest.find_first_not_of(" \t\r\n"), rest.size()));
    const bool found = !rest.empty() && rest[0] == c;
    rest.remove_prefix(found);
    return found;
  }
  // A string with its quotes, a number, true, false or null.
  std::string scan(std::string_view &rest) const {
    const bool is_string = skip(rest, '"');
    const std::string_view ends = is_string ? "\"" : ",:{}[]\" \t\r\n";
    std::string found(is_string, '"');
    for (; !rest.empty() && ends.find(rest[0]) == ends.npos; rest.remove_prefix(1)) {
      if (is_string && rest[0] == '\\' && rest.size() > 1) {
        if (rest.find_first_of("\"\\/", 1) != 1) found += '\\';
        rest.remove_prefix(1);
      }
      found += rest[0];
    }
    expect(is_string ? skip(rest, '"') : !found.empty(), rest);
    return is_string ? found + '"' : found;
  }
  void parse(Json &value, std::string_view &rest, int depth, int64_t &values) const {
    expect(depth < 64 && ++values <= 4'000'000, rest);
    const char end = skip(rest, '{') ? '}' : skip(rest, '[') ? ']' : 0;
    value.word = end == '}' ? "{}" : end ? "[]" : scan(rest);
    for (int64_t count = 0; end && !skip(rest, end); ++count) {
      expect(count == 0 || skip(rest, ','), rest);
      std::string key = end == '}' ? scan(rest) : '"' + std::to_string(count) + '"';
      expect(key[0] == '"' && (end == ']' || skip(rest, ':')), rest);
      const auto [member, is_new] = value.members.try_emplace(key.substr(1, key.size() - 2));
      require(is_new, name, ": ", key, " is there twice");
      parse(member->second, rest, depth + 1, values);
    }
  }
};

}  // namespace nf4

#endif
