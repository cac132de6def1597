// A folder of config.json and safetensors files, which stay mapped: tensors are views of them.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <set>
#include <vector>

#include "json.hpp"

struct Shape : std::vector<int64_t> {
  using vector::vector;
};

inline std::ostream &operator<<(std::ostream &stream, const Shape &shape) {
  for (size_t i = 0; i < shape.size(); ++i) stream << (i ? ", " : "[") << shape[i];
  return stream << "]";
}

struct View {
  std::string name, dtype;
  Shape shape;
  const uint8_t *data;
  size_t bytes;
};

class Checkpoint {
 public:
  explicit Checkpoint(const std::string &folder) : config(read_json(folder + "/config.json")) {
    const std::string index = folder + "/model.safetensors.index.json", map = "weight_map/";
    std::set<std::string> files{"model.safetensors"};
    if (access(index.c_str(), F_OK) == 0) {
      files.clear();
      const Json json = read_json(index);
      for (const auto &[path, file] : json.values())
        if (path.rfind(map, 0) == 0) files.insert(file);
    }
    for (const std::string &file : files) {
      require(file.find('/') == std::string::npos, index, ": ", file, " is not in the folder");
      read_shard(folder + "/" + file);
    }
  }

  bool has(const std::string &name) const { return tensors_.count(name) != 0; }
  const View &tensor(const std::string &name) const {
    require(has(name), "the checkpoint has no tensor ", name);
    return tensors_.at(name);
  }
  const View &tensor(const std::string &name, const Shape &shape) const {
    const View &view = tensor(name);
    require(view.shape == shape, name, " has the shape ", view.shape, "; expected ", shape);
    return view;
  }

  const Json config;

 private:
  static Json read_json(const std::string &path) {
    std::ifstream file(path);
    require(file.good(), path, ": cannot be read");
    return Json(path, std::string(std::istreambuf_iterator<char>(file), {}));
  }

  // 8 bytes: the size of the header, which is JSON: tensors by name, then their data.
  void read_shard(const std::string &path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status{};
    require(file >= 0 && fstat(file, &status) == 0, path, ": cannot be read");
    const size_t size = status.st_size;
    void *memory = size ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    close(file);
    require(memory != MAP_FAILED, path, ": cannot be mapped");
    maps_.emplace_back(static_cast<uint8_t *>(memory), [size](uint8_t *map) { munmap(map, size); });
    const uint8_t *bytes = maps_.back().get();
    uint64_t header = 0;
    std::memcpy(&header, bytes, std::min<size_t>(size, 8));
    require(size >= 8 && header <= size - 8, path, ": the file is shorter than its header says");
    const Json json(path, {reinterpret_cast<const char *>(bytes) + 8, header});
    for (const auto &[key, dtype] : json.values()) {
      if (key.size() < 6 || key.substr(key.size() - 6) != "/dtype") continue;
      const std::string name = key.substr(0, key.size() - 6), shape = name + "/shape/";
      const int64_t begin = json.size(name + "/data_offsets/0"),
                    end = json.size(name + "/data_offsets/1");
      require(begin <= end && uint64_t(end) <= size - 8 - header, path, ": ", name,
              " lies outside the file");
      View view{name, dtype, {}, bytes + 8 + header + begin, size_t(end - begin)};
      for (int i = 0; json.has(shape + std::to_string(i)); ++i)
        view.shape.push_back(json.size(shape + std::to_string(i)));
      tensors_.emplace(name, view);
    }
  }

  std::vector<std::unique_ptr<uint8_t, std::function<void(uint8_t *)>>> maps_;
  std::map<std::string, View> tensors_;
};
