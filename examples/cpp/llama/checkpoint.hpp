// A folder of config.json and safetensors files, which stay mapped until the program ends.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// Throws what is wrong, in parts.
template <class... Parts>
void require(bool good, const Parts &...parts) {
  if (good) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// As much JSON as config.json and the header of a safetensors file need, flattened: the text of
// each string, number, true and false by its path, such as "shape/0". null is left out.
struct Json {
  std::string name;
  std::map<std::string, std::string> values;

  Json(const std::string &name, std::string_view rest) : name(name) {
    value(rest, "", 0);
    skip(rest, ' ');
    expect(rest.empty(), rest);
  }
  bool has(const std::string &path) const { return values.count(path) != 0; }
  // `otherwise`, if given, where there is none.
  std::string text(const std::string &path, const std::string &otherwise = "") const {
    require(has(path) || !otherwise.empty(), name, ": ", path, " is missing");
    return has(path) ? values.at(path) : otherwise;
  }
  double number(const std::string &path, const std::string &otherwise = "") const {
    const std::string digits = text(path, otherwise);
    char *end = nullptr;
    const double number = std::strtod(digits.c_str(), &end);
    require(!digits.empty() && *end == 0, name, ": ", path, " is ", digits);
    return number;
  }
  int64_t size(const std::string &path, const std::string &otherwise = "") const {
    const double size = number(path, otherwise);
    require(0 <= size && size < 1e15, name, ": ", path, " is ", size);
    return static_cast<int64_t>(size);
  }

 private:
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
  // A string, a number, true, false or null. Of escapes only \" and \\ are right.
  std::string word(std::string_view &rest) const {
    std::string word;
    const bool is_string = skip(rest, '"');
    const std::string_view ends = is_string ? "\"" : ",:{}[] \t\r\n";
    for (; !rest.empty() && ends.find(rest[0]) == ends.npos; rest.remove_prefix(1)) {
      if (is_string && rest[0] == '\\' && rest.size() > 1) rest.remove_prefix(1);
      word += rest[0];
    }
    expect(is_string ? skip(rest, '"') : !word.empty(), rest);
    return word;
  }
  void value(std::string_view &rest, const std::string &path, int depth) {
    const char end = skip(rest, '{') ? '}' : skip(rest, '[') ? ']' : 0;
    const std::string text = end ? "null" : word(rest);
    if (text != "null") values[path] = text;
    for (int64_t count = 0; end && !skip(rest, end); ++count) {
      expect(depth < 16 && (count == 0 || skip(rest, ',')), rest);
      const std::string key = end == '}' ? word(rest) : std::to_string(count);
      expect(end == ']' || skip(rest, ':'), rest);
      value(rest, path.empty() ? key : path + "/" + key, depth + 1);
    }
  }
};

using Shape = std::vector<int64_t>;

inline std::string text(const Shape &shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

struct View {
  std::string dtype;
  Shape shape;
  const uint8_t *data;
  int64_t bytes;
};

struct Checkpoint {
  std::string folder;
  std::map<std::string, View> tensors;

  explicit Checkpoint(const std::string &folder) : folder(folder) {
    const std::string index = "model.safetensors.index.json", single = "model.safetensors";
    std::set<std::string> files;
    if (!std::filesystem::exists(folder + "/" + index)) {
      for (const auto &file : std::filesystem::directory_iterator(folder))
        if (file.path().extension() == ".safetensors") files.insert(file.path().filename());
    } else if (std::filesystem::exists(folder + "/" + single)) {
      files.insert(single);  // as transformers does
    } else {
      for (const auto &[key, file] : json(index).values)
        if (key.rfind("weight_map/", 0) == 0) files.insert(file);
    }
    for (const std::string &file : files) map(folder + "/" + file);
  }
  Json config() const { return json("config.json"); }
  bool has(const std::string &name) const { return tensors.count(name) != 0; }
  // Of a given shape, if one is given.
  const View &tensor(const std::string &name, const Shape &shape = {}) const {
    require(has(name), "the checkpoint has no tensor ", name);
    const View &view = tensors.at(name);
    require(shape.empty() || view.shape == shape, name, " has the shape ", text(view.shape),
            "; expected ", text(shape));
    return view;
  }

 private:
  Json json(const std::string &name) const {
    std::ifstream file(folder + "/" + name);
    require(file.good(), folder, "/", name, ": cannot be read");
    return {name, std::string(std::istreambuf_iterator<char>(file), {})};
  }
  // 8 bytes: the size of the header, which is JSON: tensors by name, then their data.
  void map(const std::string &path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    require(file >= 0, path, ": cannot be read: ", std::strerror(errno));
    const uint64_t size = std::filesystem::file_size(path);
    void *memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    require(memory != MAP_FAILED, path, ": cannot be mapped: ", std::strerror(errno));
    close(file);
    const auto *bytes = static_cast<const uint8_t *>(memory);
    uint64_t header = 0;
    std::memcpy(&header, bytes, std::min<uint64_t>(size, 8));
    require(size >= 8 && header <= size - 8, path, ": the file is shorter than its header says");
    const Json json(path, {reinterpret_cast<const char *>(bytes) + 8, header});
    for (const auto &[key, dtype] : json.values) {
      const std::string name = key.substr(0, key.rfind('/'));
      if (key != name + "/dtype") continue;
      const int64_t begin = json.size(name + "/data_offsets/0"),
                    end = json.size(name + "/data_offsets/1");
      require(begin <= end && uint64_t(end) <= size - 8 - header, path, ": ", name,
              " lies outside the file");
      Shape shape;
      for (std::string i = "0"; json.has(name + "/shape/" + i); i = std::to_string(shape.size()))
        shape.push_back(json.size(name + "/shape/" + i));
      const View view{dtype, shape, bytes + 8 + header + begin, end - begin};
      require(tensors.emplace(name, view).second, name, " is in two files");
    }
  }
};
