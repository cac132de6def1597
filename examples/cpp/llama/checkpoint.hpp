// A folder of config.json and safetensors files, which stay mapped: tensors are views of them.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <sstream>

#include "json.hpp"

inline void require(bool good, const std::string &message) {
  if (!good) throw std::runtime_error(message);
}

struct View {
  std::string name, dtype;
  std::vector<int64_t> shape;
  const uint8_t *data = nullptr;
  size_t bytes = 0;
};

inline std::string text_of(const std::vector<int64_t> &shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

class Checkpoint {
 public:
  explicit Checkpoint(const std::string &folder) : config(read_json(folder + "/config.json")) {
    const std::string index = folder + "/model.safetensors.index.json";
    std::set<std::string> files{"model.safetensors"};
    if (access(index.c_str(), F_OK) == 0) {
      files.clear();
      const Json json = read_json(index);
      for (const auto &entry : json.get<Json::Object>("weight_map"))
        files.insert(entry.second.as<std::string>("weight_map"));
    }
    for (const std::string &file : files) read_shard(folder + "/" + file);
  }

  const View *find(const std::string &name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
  }
  const View &tensor(const std::string &name) const {
    const View *view = find(name);
    require(view, "the checkpoint has no tensor " + name);
    return *view;
  }
  const View &tensor(const std::string &name, const std::vector<int64_t> &shape) const {
    const View &view = tensor(name);
    require(view.shape == shape,
            name + " has the shape " + text_of(view.shape) + "; expected " + text_of(shape));
    return view;
  }

  const Json config;

 private:
  static Json read_json(const std::string &path) {
    std::ifstream file(path);
    require(file.good(), path + ": cannot be read");
    std::stringstream text;
    text << file.rdbuf();
    return parse(path, text.str());
  }
  static Json parse(const std::string &path, std::string_view text) {
    try {
      return JsonParser::parse(text);
    } catch (const std::exception &error) {
      throw std::runtime_error(path + ": " + error.what());
    }
  }

  // 8 bytes: the size of the header, which is JSON: tensors by name, then their data.
  void read_shard(const std::string &path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status{};
    require(file >= 0 && fstat(file, &status) == 0, path + ": cannot be read");
    const size_t size = status.st_size;
    void *memory = size ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    close(file);
    require(memory != MAP_FAILED, path + ": cannot be mapped");
    maps_.emplace_back(static_cast<uint8_t *>(memory), [size](uint8_t *map) { munmap(map, size); });
    const uint8_t *bytes = maps_.back().get();
    uint64_t header = 0;
    if (size >= 8) std::memcpy(&header, bytes, 8);
    require(size >= 8 && header <= size - 8, path + ": the file is shorter than its header says");
    const Json json = parse(path, {reinterpret_cast<const char *>(bytes) + 8, header});
    for (const auto &[name, entry] : json.as<Json::Object>(path)) {
      if (name == "__metadata__") continue;
      View view{name, entry.get<std::string>("dtype"), sizes(entry, "shape"), nullptr, 0};
      const std::vector<int64_t> offsets = sizes(entry, "data_offsets");
      require(offsets.size() == 2 && offsets[0] <= offsets[1] &&
                  static_cast<uint64_t>(offsets[1]) <= size - 8 - header,
              path + ": " + name + " lies outside the file");
      view.data = bytes + 8 + header + offsets[0];
      view.bytes = offsets[1] - offsets[0];
      tensors_[name] = view;
    }
  }
  static std::vector<int64_t> sizes(const Json &entry, const char *key) {
    std::vector<int64_t> result;
    for (const Json &each : entry.get<Json::Array>(key)) {
      const double size = each.as<double>(key);
      require(0 <= size && size < 1e15, std::string(key) + " has " + std::to_string(size));
      result.push_back(static_cast<int64_t>(size));
    }
    return result;
  }

  std::vector<std::unique_ptr<uint8_t, std::function<void(uint8_t *)>>> maps_;
  std::map<std::string, View> tensors_;
};
