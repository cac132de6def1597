// A JSON reader for checkpoint.hpp and for an engine's own configuration. Header-only, C++17, on
// the standard library. ERRORS: an nf4::Error, or std::bad_alloc.
#ifndef NF4_JSON_HPP
#define NF4_JSON_HPP

#include <nf4/nf4.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <locale>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// These headers are compiled into programs. Each version has a namespace of its own, nf4::v0_1_0,
// so that libraries built with different versions can be in one program.
#define NF4_JOIN_VERSION(major, minor, patch) v##major##_##minor##_##patch
#define NF4_NAMESPACE_OF(major, minor, patch) NF4_JOIN_VERSION(major, minor, patch)
#define NF4_INLINE_NAMESPACE \
  NF4_NAMESPACE_OF(NF4_VERSION_MAJOR, NF4_VERSION_MINOR, NF4_VERSION_PATCH)

namespace nf4 {
inline namespace NF4_INLINE_NAMESPACE {

class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace detail {

constexpr uint32_t kNoPoint = UINT32_MAX;

// Removes the first code point from UTF-8 that is not empty. If it is not valid, removes one byte
// and returns kNoPoint.
inline uint32_t next_point(std::string_view &text) {
  const auto byte = [&text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const uint32_t first = byte(0);
  const size_t more = first < 0xc2 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : first < 0xf5 ? 3 : 0;
  uint32_t point = more ? first & (0x3f >> more) : first < 0x80 ? first : kNoPoint;
  for (size_t i = 1; i <= more && point != kNoPoint; ++i)
    point = i < text.size() && (byte(i) & 0xc0) == 0x80 ? point << 6 | (byte(i) & 0x3f) : kNoPoint;
  const bool is_long = (more == 2 && point < 0x800) || (more == 3 && point < 0x10000);
  if (is_long || (point >= 0xd800 && point < 0xe000) || point > 0x10ffff) point = kNoPoint;
  text.remove_prefix(point == kNoPoint ? 1 : more + 1);
  return point;
}

}  // namespace detail

// Returns UTF-8 for a message. A name in a file must not control a terminal, so control characters,
// marks that change the direction of text, and invalid bytes become escapes.
inline std::string printable(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string found;
  while (!text.empty()) {
    const std::string_view before = text;
    const uint32_t point = detail::next_point(text);
    const bool is_control = point < 0x20 || (point >= 0x7f && point < 0xa0);
    const bool turns = point == 0x200e || point == 0x200f || (point >= 0x2028 && point <= 0x202e) ||
                       (point >= 0x2066 && point <= 0x2069);
    const std::string_view part = before.substr(0, before.size() - text.size());
    if (!is_control && !turns && point != detail::kNoPoint) {
      found += part;
      continue;
    }
    for (const char c : part)
      (found += "\\x") += {kDigits[static_cast<unsigned char>(c) >> 4], kDigits[c & 15]};
  }
  return found;
}

// Throws an Error if not `good`. Its text consists of the parts, each made printable().
template <class... Parts>
void require(bool good, const Parts &...parts) {
  if (good) return;
  std::ostringstream text;
  (text << ... << parts);
  throw Error(printable(text.str()));
}

// The shape of a tensor.
using Shape = std::vector<int64_t>;

inline std::string text(const Shape &shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// A value of JSON. Members are found by a path, such as "rope_scaling/factor" or "shape/0"; null
// counts as missing. If the value is missing, functions return `otherwise` if it is given, and
// throw if not; they also throw if the value has another type.
struct Json {
  std::string name;           // for errors; for a member of an object, its key
  std::string word;           // "{}" of an object, "[]" of an array; a string with its quotes and
                              // without its escapes, and what else there is as it is written
  std::vector<Json> members;  // members of an object are in the order of their keys

  Json() = default;
  // Throws for text that is not JSON in UTF-8, for a repeated key, and beyond 64 levels or a
  // million values. With `has_nan`, the words NaN, Infinity and -Infinity, which Python writes, are
  // accepted, too, though not as numbers.
  Json(std::string title, std::string_view rest, bool has_nan = false) : name(std::move(title)) {
    for (std::string_view text = rest; !text.empty();)
      require(detail::next_point(text) != detail::kNoPoint, name, ": not UTF-8");
    int64_t values = 0;
    parse(*this, rest, 0, values, has_nan);
    skip(rest, ' ');
    expect(rest.empty(), rest);
  }

  // Returns NULL if the value is missing.
  const Json *find(std::string_view path) const {
    const Json *found = this;
    while (found && !path.empty()) {
      const size_t end = std::min(path.find('/'), path.size());
      if (end > 0) found = found->member(path.substr(0, end));
      path.remove_prefix(std::min(end + 1, path.size()));
    }
    return found && found->word != "null" ? found : nullptr;
  }
  bool has(std::string_view path) const { return find(path) != nullptr; }
  std::string text(const std::string &path, std::optional<std::string> otherwise = {}) const {
    return read(path, otherwise, [](const std::string &found, std::string &value) {
      if (found[0] == '"') value = found.substr(1, found.size() - 2);
      return found[0] == '"';
    });
  }
  // Returns a string that is one of `choices`.
  std::string choice(const std::string &path, const std::vector<std::string> &choices,
                     std::optional<std::string> otherwise = {}) const {
    const std::string found = text(path, std::move(otherwise));
    require_choice(path, found, choices);
    return found;
  }
  // Throws if `found`, the value at `path`, is none of `choices`.
  void require_choice(const std::string &path, const std::string &found,
                      const std::vector<std::string> &choices) const {
    std::string all;
    for (const std::string &each : choices) all += (all.empty() ? "" : ", ") + each;
    require(std::count(choices.begin(), choices.end(), found), name, ": ", path, " is ", found,
            "; expected: ", all);
  }
  double number(const std::string &path, std::optional<double> otherwise = {}) const {
    return read(path, otherwise, [](const std::string &found, double &value) {
      std::istringstream digits(found);
      digits.imbue(std::locale::classic());
      return (digits >> value) && digits.eof() && found.find('x') == found.npos;
    });
  }
  // Returns a whole number from 0 to `largest`.
  int64_t size(const std::string &path, std::optional<int64_t> otherwise = {},
               int64_t largest = INT64_MAX) const {
    return read(path, otherwise, [largest](const std::string &found, int64_t &value) {
      const char *const end = found.data() + found.size();
      const auto [stop, error] = std::from_chars(found.data(), end, value);
      return error == std::errc() && stop == end && 0 <= value && value <= largest;
    });
  }
  // Returns an array of such numbers.
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
  const Json *member(std::string_view key) const {
    if (word == "[]") {
      size_t i = members.size();
      const auto [stop, error] = std::from_chars(key.data(), key.data() + key.size(), i);
      const bool is_number = error == std::errc() && stop == key.data() + key.size();
      return is_number && i < members.size() ? &members[i] : nullptr;
    }
    const auto at = std::lower_bound(members.begin(), members.end(), key, is_before);
    return at != members.end() && at->name == key ? &*at : nullptr;
  }
  static bool is_before(const Json &one, std::string_view key) { return one.name < key; }
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
  char next(std::string_view &rest) const {
    expect(!rest.empty(), rest);
    const char c = rest[0];
    rest.remove_prefix(1);
    return c;
  }
  // Scans the rest of a string.
  std::string scan_string(std::string_view rest_of, std::string_view &rest) const {
    std::string found = "\"";
    for (char c; (c = next(rest)) != '"';) {
      expect(static_cast<unsigned char>(c) >= ' ', rest_of);
      if (c != '\\') {
        found += c;
        continue;
      }
      const char escape = next(rest);
      const size_t i = std::string_view("\"\\/bfnrt").find(escape);
      expect(i != std::string_view::npos || escape == 'u', rest_of);
      if (escape != 'u')
        found += "\"\\/\b\f\n\r\t"[i];
      else
        append_utf8(found, code_point(rest));
    }
    return found + '"';
  }
  // Scans the 4 hexadecimal digits after \u, and a second such escape if they are half of a pair.
  uint32_t code_point(std::string_view &rest) const {
    const auto digits = [&] {
      uint32_t value = 0;
      const char *const end = rest.data() + std::min<size_t>(rest.size(), 4);
      const auto [stop, error] = std::from_chars(rest.data(), end, value, 16);
      expect(error == std::errc() && stop == rest.data() + 4, rest);
      rest.remove_prefix(4);
      return value;
    };
    const uint32_t high = digits();
    if (high < 0xd800 || high >= 0xe000) return high;
    expect(high < 0xdc00 && rest.substr(0, 2) == "\\u", rest);
    rest.remove_prefix(2);
    const uint32_t low = digits();
    expect(low >= 0xdc00 && low < 0xe000, rest);
    return 0x10000 + ((high & 0x3ff) << 10) + (low & 0x3ff);
  }
  static void append_utf8(std::string &to, uint32_t point) {
    const int more = point < 0x80 ? 0 : point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    const uint32_t mark = more ? (0x7f80 >> more) & 0xff : 0;
    to += static_cast<char>(mark | (point >> (6 * more)));
    for (int i = more - 1; i >= 0; --i) to += static_cast<char>(0x80 | ((point >> (6 * i)) & 0x3f));
  }
  static bool is_number(std::string_view word) {
    const auto skip_any = [&word](std::string_view of, size_t most) {
      const size_t count = std::min({word.find_first_not_of(of), word.size(), most});
      word.remove_prefix(count);
      return count > 0;
    };
    const auto digits = [&] { return skip_any("0123456789", word.size()); };
    skip_any("-", 1);
    if (!skip_any("0", 1) && !digits()) return false;
    if (skip_any(".", 1) && !digits()) return false;
    if (skip_any("eE", 1) && (skip_any("+-", 1), !digits())) return false;
    return word.empty();
  }
  std::string scan(std::string_view &rest, bool has_nan) const {
    if (const std::string_view before = rest; skip(rest, '"')) return scan_string(before, rest);
    const std::string_view from = rest,
                           found = from.substr(0, rest.find_first_of(",:{}[]\" \t\r\n"));
    const bool is_nan = found == "NaN" || found == "Infinity" || found == "-Infinity";
    expect(found == "true" || found == "false" || found == "null" || is_number(found) ||
               (has_nan && is_nan),
           from);
    rest.remove_prefix(found.size());
    return std::string(found);
  }
  void parse(Json &value, std::string_view &rest, int depth, int64_t &values, bool has_nan) const {
    expect(depth < 64 && ++values <= 1'000'000, rest);
    const char end = skip(rest, '{') ? '}' : skip(rest, '[') ? ']' : 0;
    value.word = end == '}' ? "{}" : end ? "[]" : scan(rest, has_nan);
    while (end && !skip(rest, end)) {
      expect(value.members.empty() || skip(rest, ','), rest);
      Json &member = value.members.emplace_back();
      if (end == '}') {
        const std::string_view before = rest;
        expect(skip(rest, '"'), before);
        member.name = scan_string(before, rest);
        member.name = member.name.substr(1, member.name.size() - 2);
        expect(skip(rest, ':'), rest);
      }
      parse(member, rest, depth + 1, values, has_nan);
    }
    if (end != '}') return;
    auto &all = value.members;
    std::sort(all.begin(), all.end(), [](const Json &a, const Json &b) { return a.name < b.name; });
    const auto twice = std::adjacent_find(
        all.begin(), all.end(), [](const Json &a, const Json &b) { return a.name == b.name; });
    require(twice == all.end(), name, ": \"", twice == all.end() ? "" : twice->name,
            "\" is there twice");
  }
};

}  // namespace NF4_INLINE_NAMESPACE
}  // namespace nf4

#endif
