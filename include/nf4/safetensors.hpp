// Maps or reads safetensors files, checks them, and finds the files of a folder's checkpoint.
// checkpoint.hpp uses it. Header-only, C++17, on POSIX and the standard library.
//
// LIFETIMES  Tensors are read-only, and valid as long as the object that opened their file. Nobody
//            may change a mapped file meanwhile; reading a part that was cut off raises SIGBUS.
// ERRORS     As in json.hpp; errors of a file name it.
#ifndef NF4_SAFETENSORS_HPP
#define NF4_SAFETENSORS_HPP

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <nf4/json.hpp>
#include <set>
#include <system_error>

namespace nf4 {
inline namespace NF4_INLINE_NAMESPACE {

// Says how a file's tensors come into memory. Mapped tensors are read from the file when they are
// used, and processes share them. Tensors that are read take memory of their own from the start;
// that is faster on network file systems (Lustre, NFS), and later changes of the file do not
// matter.
enum class FileAccess { kMap, kRead };

// A tensor of a file.
struct StoredTensor {
  std::string name;   // for errors: the names of the file and of the tensor
  std::string dtype;  // the name in safetensors, such as "BF16"
  Shape shape;
  const uint8_t *data;  // at any alignment
  int64_t bytes;        // the size that dtype and shape imply
};

namespace detail {

// `first` times all sizes; -1, which is no size, if that is more than 2^63 - 1.
inline int64_t product(const Shape &shape, int64_t first) {
  for (const int64_t size : shape)
    if (__builtin_mul_overflow(first, size, &first)) return -1;
  return first;
}
// The same as for a tensor without sizes of 0, so that a 0 does not hide other sizes that are too
// large.
inline int64_t product_of_sizes(Shape shape, int64_t first) {
  const bool is_empty = std::count(shape.begin(), shape.end(), 0) != 0;
  std::replace(shape.begin(), shape.end(), int64_t{0}, int64_t{1});
  const int64_t all = product(shape, first);
  return is_empty && all > 0 ? 0 : all;
}

struct Unmap {
  size_t bytes;
  void operator()(void *memory) const { munmap(memory, bytes); }
};
using Memory = std::unique_ptr<void, Unmap>;

// A regular file, open for reading.
class RegularFile {
 public:
  explicit RegularFile(const std::string &path)
      // Without O_NONBLOCK, FIFOs wait.
      : path_(path), fd_{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)} {
    require(fd_.value >= 0, path, ": cannot be read: ", std::strerror(errno));
    struct stat status{};
    require(fstat(fd_.value, &status) == 0 && S_ISREG(status.st_mode), path,
            ": it is not a regular file");
    bytes_ = static_cast<size_t>(status.st_size);
  }
  size_t bytes() const { return bytes_; }
  std::string read(size_t limit) const {
    require(bytes_ <= limit, path_, ": it is larger than ", limit, " bytes");
    std::string text(bytes_, '\0');
    read_into(text.data());
    return text;
  }
  // Returns all of its bytes, mapped or read into memory.
  Memory contents(FileAccess access) const {
    if (bytes_ == 0) return {nullptr, Unmap{0}};
    const bool maps = access == FileAccess::kMap;
    void *const memory =
        mmap(nullptr, bytes_, maps ? PROT_READ : PROT_READ | PROT_WRITE,
             maps ? MAP_PRIVATE : MAP_PRIVATE | MAP_ANONYMOUS, maps ? fd_.value : -1, 0);
    require(memory != MAP_FAILED, path_, ": cannot be mapped: ", std::strerror(errno));
    Memory contents(memory, Unmap{bytes_});
    if (!maps) read_into(static_cast<char *>(memory));
    return contents;
  }

 private:
  void read_into(char *memory) const {
    for (size_t done = 0; done < bytes_;) {
      const ssize_t count = ::read(fd_.value, memory + done, bytes_ - done);
      if (count < 0 && errno == EINTR) continue;
      require(count >= 0, path_, ": cannot be read: ", std::strerror(errno));
      require(count > 0, path_, ": it became shorter while it was read");
      done += static_cast<size_t>(count);
    }
  }

  struct Descriptor {
    int value;
    ~Descriptor() {
      if (value >= 0) close(value);
    }
  };
  std::string path_;
  Descriptor fd_;
  size_t bytes_ = 0;
};

// Returns 0 for a name that is no dtype of safetensors.
inline int64_t bits_of(std::string_view dtype) {
  static constexpr std::pair<int, std::string_view> kDtypes[] = {
      {4, " F4 "},
      {6, " F6_E2M3 F6_E3M2 "},
      {8, " BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ "},
      {16, " I16 U16 F16 BF16 "},
      {32, " I32 U32 F32 "},
      {64, " C64 F64 I64 U64 "}};
  if (dtype.find(' ') != dtype.npos || dtype.empty()) return 0;
  for (const auto &[bits, names] : kDtypes)
    if (names.find(" " + std::string(dtype) + " ") != names.npos) return bits;
  return 0;
}

}  // namespace detail

// Throws if the file cannot be read or breaks the format.
class SafetensorsFile {
 public:
  std::map<std::string, StoredTensor> tensors;

  explicit SafetensorsFile(const std::string &path, FileAccess access = FileAccess::kMap) {
    const detail::RegularFile file(path);
    memory_ = file.contents(access);
    const auto *bytes = static_cast<const uint8_t *>(memory_.get());
    // 8 bytes give the size of the header, which is JSON: tensors by name. Their data follows.
    uint64_t header = UINT64_MAX;
    if (file.bytes() >= 8) std::memcpy(&header, bytes, 8);
    require(file.bytes() >= 8 && header <= file.bytes() - 8, path,
            ": the file is shorter than its header says");
    require(header <= 100'000'000, path, ": its header is larger than 100 MB");
    data_ = bytes + 8 + header;
    data_bytes_ = static_cast<int64_t>(file.bytes() - 8 - header);
    const Json json(path, {reinterpret_cast<const char *>(bytes) + 8, header});
    require(json.word == "{}" && bytes[8] == '{', path, ": its header is no object");
    for (const Json &member : json.members) {
      Json entry = member;
      entry.name = path + ": " + member.name;
      if (member.name == "__metadata__")
        check_metadata(entry);
      else
        tensors.emplace_hint(tensors.end(), member.name, tensor(entry));
    }
    check_coverage(path);
  }

 private:
  static void check_metadata(const Json &entry) {
    const auto is_string = [](const Json &each) { return each.word[0] == '"'; };
    require(entry.word == "null" ||
                (entry.word == "{}" &&
                 std::all_of(entry.members.begin(), entry.members.end(), is_string)),
            entry.name, " is no object of strings");
  }
  StoredTensor tensor(const Json &entry) const {
    const Shape offsets = entry.sizes("data_offsets"), shape = entry.sizes("shape");
    require(offsets.size() == 2 && offsets[0] <= offsets[1] && offsets[1] <= data_bytes_,
            entry.name, " lies outside the file");
    const std::string dtype = entry.text("dtype");
    const int64_t bits = detail::bits_of(dtype), bytes = offsets[1] - offsets[0];
    require(bits > 0, entry.name, ": dtype is ", dtype, ", which safetensors has not");
    require(shape.size() <= 32, entry.name, " has ", shape.size(), " dimensions; 32 are read");
    const int64_t all = detail::product_of_sizes(shape, bits);
    require(all >= 0 && all % 8 == 0 && all / 8 == bytes, entry.name, " has ", bytes, " bytes for ",
            dtype, " of shape ", text(shape));
    return {entry.name, dtype, shape, data_ + offsets[0], bytes};
  }
  // Checks that every byte of the data belongs to exactly one tensor.
  void check_coverage(const std::string &path) const {
    std::vector<const StoredTensor *> sorted;
    for (const auto &[name, tensor] : tensors) sorted.push_back(&tensor);
    std::sort(sorted.begin(), sorted.end(), [](const StoredTensor *a, const StoredTensor *b) {
      return std::pair(a->data, a->bytes) < std::pair(b->data, b->bytes);
    });
    int64_t reached = 0;
    for (const StoredTensor *each : sorted) {
      const int64_t begin = each->data - data_;
      require(begin == reached, each->name,
              begin < reached ? " overlaps other data" : " leaves a gap before it",
              ": it begins at ", begin, "; expected ", reached);
      reached += each->bytes;
    }
    require(reached == data_bytes_, path, ": its tensors take ", reached, " bytes, and it has ",
            data_bytes_);
  }

  detail::Memory memory_{nullptr, detail::Unmap{0}};
  const uint8_t *data_ = nullptr;
  int64_t data_bytes_ = 0;
};

// Finds the files of a checkpoint. The path names a safetensors file, an index or a folder. A
// folder's checkpoint is model.safetensors, else model.safetensors.index.json, else the only index,
// else the only safetensors file. Throws if there is none, and if an index is not valid.
struct CheckpointFiles {
  std::set<std::string> paths;
  std::string folder, index;  // "" where there is none
  Json weight_map;            // from the index: tensors, and the names of their files

  explicit CheckpointFiles(const std::string &path) {
    const std::string suffix = ".safetensors.index.json";
    std::error_code error;
    std::string file = path;
    if (std::filesystem::is_directory(path, error)) {
      folder = path;
      file = path + "/" + choose(path, suffix);
    } else if (ends_with(path, suffix)) {
      folder = path.find('/') == path.npos ? "." : path.substr(0, path.rfind('/') + 1);
    }
    if (ends_with(file, suffix))
      read_index(file);
    else
      paths = {file};
  }

 private:
  static bool ends_with(const std::string &text, const std::string &end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.npos, end) == 0;
  }
  static std::string choose(const std::string &path, const std::string &suffix) {
    std::error_code error;
    std::set<std::string> names, indices, files;
    std::filesystem::directory_iterator at(path, error);
    for (; !error && at != std::filesystem::directory_iterator(); at.increment(error))
      names.insert(at->path().filename());
    require(!error, path, ": cannot be read: ", error.message());
    // model.safetensors comes before an index, as in transformers.
    for (const char *single : {"model.safetensors", "model.safetensors.index.json"})
      if (names.count(single)) return single;
    for (const std::string &name : names) {
      if (ends_with(name, suffix)) indices.insert(name);
      if (ends_with(name, ".safetensors")) files.insert(name);
    }
    const std::set<std::string> &found = indices.empty() ? files : indices;
    require(found.size() == 1, path, ": neither model.safetensors nor its index, but ",
            found.size(), indices.empty() ? " other safetensors files" : " other indices");
    return *found.begin();
  }
  void read_index(const std::string &file) {
    index = file;
    const Json json(index, detail::RegularFile(index).read(100'000'000));
    const Json *found = json.find("weight_map");
    require(found && found->word == "{}" && !found->members.empty(), index,
            ": it has no weight_map");
    weight_map = *found;
    for (Json shard : weight_map.members) {
      shard.name = index + ": " + shard.name;
      const std::string name = shard.text("");
      require(name.find('/') == name.npos && name.find('\0') == name.npos && !name.empty() &&
                  name != "." && name != "..",
              shard.name, " is in ", name, ", which is no file's name");
      paths.insert(folder + "/" + name);
    }
  }
};

}  // namespace NF4_INLINE_NAMESPACE
}  // namespace nf4

#endif
