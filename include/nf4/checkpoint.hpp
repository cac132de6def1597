// Checkpoints for engines in C++17: the tensors of safetensors files, and descriptors for nf4.h of
// those that are weights in 4 bits. A header alone, on POSIX, the standard library and nf4.h; it is
// compiled into the program, and not a part of the ABI.
//
//   const nf4::Checkpoint checkpoint("model/");
//   const nf4_tensor weight = checkpoint.nf4_weight("model.layers.0.mlp.up_proj.weight");
//
// LIFETIMES  Pointers, those of descriptors too, are to mapped files: only to be read, and valid as
//            long as the Checkpoint. Reading what another program cut off a file raises SIGBUS.
// ERRORS     What is wrong is thrown as an nf4::Error that names the file, the tensor or both.
// THREADS    Const functions may be called from any number of threads at once.
#ifndef NF4_CHECKPOINT_HPP
#define NF4_CHECKPOINT_HPP

#include <fcntl.h>
#include <nf4/nf4.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <nf4/products.hpp>
#include <set>
#include <type_traits>

namespace nf4 {

inline nf4_sizes sizes_of(const nf4_tensor &weight, const std::string &name = "") {
  nf4_sizes sizes{sizeof sizes, 0, 0, 0, 0, 0};
  check(nf4_tensor_sizes(&weight, &sizes), name);
  return sizes;
}
inline nf4_int4_sizes sizes_of(const nf4_int4_tensor &weight, const std::string &name = "") {
  nf4_int4_sizes sizes{sizeof sizes, 0, 0, 0, 0};
  check(nf4_int4_tensor_sizes(&weight, &sizes), name);
  return sizes;
}

// Calls visit(part, bytes) for the parts of a weight, of which some may be NULL.
template <class Visit>
void visit_parts(nf4_tensor &weight, Visit visit) {
  const nf4_sizes sizes = sizes_of(weight);
  visit(weight.packed, sizes.packed_bytes);
  visit(weight.absmax, sizes.absmax_bytes);
  visit(weight.nested_absmax, sizes.nested_blocks * 4);
  visit(weight.nested_code, 256 * 4);
  visit(weight.nested_offset, 4);
  visit(weight.codebook, 16 * 4);
}
template <class Visit>
void visit_parts(nf4_int4_tensor &weight, Visit visit) {
  const nf4_int4_sizes sizes = sizes_of(weight);
  visit(weight.packed, sizes.packed_bytes);
  visit(weight.scales, sizes.scales_bytes);
  visit(weight.zeros, sizes.zeros_bytes);
  visit(weight.g_idx, weight.cols * 4);
  visit(weight.permutation, weight.cols * 4);
}
// A weight with its parts elsewhere, as in the memory of a GPU: copy(part, bytes) returns where the
// copy of a part is.
template <class Weight, class Copy>
Weight copy_parts(Weight weight, Copy copy) {
  visit_parts(weight, [&copy](auto *&part, int64_t bytes) {
    if (part) part = static_cast<std::remove_reference_t<decltype(part)>>(copy(part, bytes));
  });
  return weight;
}

// A tensor of a file.
struct StoredTensor {
  std::string name;   // in errors: the file's and its own
  std::string dtype;  // as safetensors has it, such as "BF16"
  Shape shape;
  const uint8_t *data;  // at any alignment
  int64_t bytes;        // as many as dtype and shape ask for
};

class Checkpoint {
 public:
  // Maps a safetensors file, or those of a folder: model.safetensors, else those that
  // model.safetensors.index.json names, else the only one there is.
  // Throws where there is none, or one that cannot be read or breaks the format, for a tensor that
  // is in two files, and for a config.json that is no JSON.
  explicit Checkpoint(const std::string &path) : path_(path) {
    const std::string config = path + "/config.json";
    if (exists(config)) config_ = parse(config);
    for (const std::string &file : files_of(path)) map(file);
  }

  // config.json of the folder; throws where there is none.
  const Json &config() const {
    require(!config_.word.empty(), path_, "/config.json: cannot be read");
    return config_;
  }
  // As they are stored, the parts of weights too, by name.
  const std::map<std::string, StoredTensor> &tensors() const { return tensors_; }
  bool has(const std::string &name) const { return tensors_.count(name) != 0; }
  // Here and below: throws where there is none, and where it has not the `shape`, if one is given.
  const StoredTensor &tensor(const std::string &name, const Shape &shape = {}) const {
    require(has(name), path_, " has no tensor ", name);
    const StoredTensor &found = tensors_.at(name);
    same_shape(found.name, found.shape, shape);
    return found;
  }
  // The numbers of a tensor of F32, F16 or BF16, as a T that a float converts to.
  template <class T = float>
  std::vector<T> dense(const std::string &name, const Shape &shape = {}) const {
    const StoredTensor &found = tensor(name, shape);
    const bool is_half = found.dtype == "F16", is_float = found.dtype == "F32";
    require(is_half || is_float || found.dtype == "BF16", found.name, " is ", found.dtype,
            "; F32, BF16 and F16 are read");
    const size_t bytes = is_float ? 4 : 2;
    std::vector<T> values(found.bytes / bytes);
    for (size_t i = 0; i < values.size(); ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, found.data + i * bytes, bytes);
      const bool is_finite = !is_half || (bits & 0x7c00) != 0x7c00;
      if (is_half) bits = (bits & 0x8000) << 16 | (bits & 0x7fff) << 13;
      if (!is_finite) bits |= 0x7f800000;
      if (!is_half && !is_float) bits <<= 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      values[i] = T(is_half && is_finite ? value * 0x1p112f : value);
    }
    return values;
  }

  // Is a weight in NF4 or FP4, as bitsandbytes and `nf4 quantize` store it? Names of weights end
  // with ".weight".
  bool is_nf4(const std::string &name) const { return has(name + kNf4) || has(name + kFp4); }
  // Its descriptor: flat or nested, with a codebook where the file has another than the format's.
  // All dimensions but the last are rows. Throws where parts contradict the quant_state.
  nf4_tensor nf4_weight(const std::string &name, const Shape &shape = {}) const {
    const bool is_fp4 = has(name + kFp4);
    const StoredTensor &stored = tensor(name + (is_fp4 ? kFp4 : kNf4));
    require(!is_fp4 || !has(name + kNf4), stored.name, ": the weight has one of nf4, too");
    const Json state(stored.name, {reinterpret_cast<const char *>(stored.data),
                                   static_cast<size_t>(stored.bytes)});
    state.choice("quant_type", {is_fp4 ? "fp4" : "nf4"});
    state.choice("dtype", {"float32", "float16", "bfloat16"});
    const Shape dense = state.sizes("shape");
    require(!dense.empty(), state.name, ": shape is empty");
    same_shape(tensor(name).name, dense, shape);
    const auto nested = state.members.lower_bound("nested_");
    const bool is_nested = nested != state.members.end() && nested->first.rfind("nested_", 0) == 0;
    nf4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.format = is_fp4 ? NF4_FORMAT_FP4 : NF4_FORMAT_NF4;
    weight.blocksize = static_cast<int32_t>(state.size("blocksize", {}, 4096));
    weight.rows = product({dense.begin(), dense.end() - 1}, 1);
    weight.cols = dense.back();
    if (is_nested)
      weight.nested_blocksize = static_cast<int32_t>(state.size("nested_blocksize", {}, 1 << 30));
    require(!is_nested || weight.nested_blocksize, state.name, ": nested_blocksize is 0");
    const nf4_sizes sizes = sizes_of(weight, state.name);
    weight.packed = part(name, "", sizes.packed_bytes);
    weight.absmax = part(name + ".absmax", is_nested ? "U8" : "F32", sizes.absmax_bytes);
    const auto *codebook = part<float>(name + ".quant_map", "F32", 16 * 4);
    // By value: bitsandbytes writes the zero of FP4's code 8 without its sign.
    if (!std::equal(codebook, codebook + 16, nf4_codebook(weight.format)))
      weight.codebook = codebook;
    if (!is_nested) return weight;
    state.choice("nested_dtype", {"float32"});
    const double offset = state.number("nested_offset");
    require(std::abs(offset) <= FLT_MAX, state.name, ": nested_offset is ", offset);
    weight.nested_absmax = part<float>(name + ".nested_absmax", "F32", sizes.nested_blocks * 4);
    weight.nested_code = part<float>(name + ".nested_quant_map", "F32", 256 * 4);
    weight.nested_offset = keep<float>(4);
    *weight.nested_offset = static_cast<float>(offset);
    return weight;
  }

  // Is a weight in integers of GPTQ, AWQ or compressed-tensors? Its tensors have ".qweight" or
  // ".weight_packed" in place of ".weight".
  bool is_int4(const std::string &name) const {
    return has(module_of(name) + ".qweight") || has(module_of(name) + ".weight_packed");
  }
  // Its descriptor. quantization_config says which layout it is, and GPTQ's version by
  // checkpoint_format or format; without one GPTQ, version 1, and AWQ are known by their shapes.
  // g_idx is NULL where the columns are in order. Throws where parts contradict one another, the
  // layout or quantization_config.
  nf4_int4_tensor int4_weight(const std::string &name, const Shape &shape = {}) const {
    const std::string module = module_of(name);
    const bool is_compressed = has(module + ".weight_packed");
    const std::string packed = module + (is_compressed ? ".weight_packed" : ".qweight"),
                      scales = module + (is_compressed ? ".weight_scale" : ".scales"),
                      zeros = module + (is_compressed ? ".weight_zero_point" : ".qzeros"),
                      g_idx = module + (is_compressed ? ".weight_g_idx" : ".g_idx");
    const StoredTensor &codes = tensor(packed), &factors = tensor(scales);
    require(codes.shape.size() == 2 && factors.shape.size() == 2, codes.name, " has the shape ",
            text(codes.shape), " and its scales ", text(factors.shape), "; expected matrices");
    const std::string where = codes.name + ": the weight", of = "quantization_config/";
    const bool is_like_awq = !has(g_idx) && factors.shape[1] == product({codes.shape[1]}, 8);
    const char *const likely = is_compressed ? "compressed-tensors" : is_like_awq ? "awq" : "gptq";
    const std::string method = config_.text(of + "quant_method", likely);
    const bool is_awq = method == "awq", is_gptq = method == "gptq";
    require(is_compressed ? method == likely : is_awq || is_gptq, where, " is not of ", method);
    require(factors.dtype == "F16" || factors.dtype == "BF16", factors.name, " is ", factors.dtype,
            "; F16 and BF16 are read");
    nf4_int4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.layout = is_awq ? NF4_INT4_AWQ : is_gptq ? NF4_INT4_GPTQ : NF4_INT4_COMPRESSED_TENSORS;
    weight.scales_dtype = factors.dtype == "F16" ? NF4_DTYPE_FP16 : NF4_DTYPE_BF16;
    weight.rows = is_awq ? product({codes.shape[1]}, 8) : codes.shape[1];
    weight.cols = is_awq ? codes.shape[0] : product({codes.shape[0]}, 8);
    if (is_compressed) {  // whose last word of a row need not be full
      const auto *stored = part<char>(module + ".weight_shape", "I64", 16, {2});
      std::memcpy(&weight.rows, stored, 8);
      std::memcpy(&weight.cols, stored + 8, 8);
    }
    same_shape(where, {weight.rows, weight.cols}, shape);
    const int64_t groups = factors.shape[is_compressed ? 1 : 0];
    require(weight.rows > 0 && groups > 0 && weight.cols >= groups && weight.cols % groups == 0,
            where, " has the shape ", text({weight.rows, weight.cols}), " and ", groups,
            " groups of columns");
    const auto matrix = [is_compressed](int64_t n, int64_t k) {
      return is_compressed ? Shape{n, k} : Shape{k, n};
    };
    same_shape(factors.name, factors.shape, matrix(weight.rows, groups));
    const int64_t group_size = groups == 1 ? -1 : weight.cols / groups;
    weight.group_size = static_cast<int32_t>(std::min<int64_t>(group_size, INT32_MAX));
    const nf4_int4_sizes sizes = sizes_of(weight, where);
    const int64_t row_words = (weight.rows + 7) / 8, col_words = (weight.cols + 7) / 8;
    weight.packed = part(packed, "I32", sizes.packed_bytes,
                         is_awq ? matrix(row_words, weight.cols) : matrix(weight.rows, col_words));
    weight.scales = part(scales, "", sizes.scales_bytes);
    // Without zero points all are 8, which GPTQ always stores.
    const bool needs_zeros = is_gptq || (is_awq && config_.flag(of + "zero_point", true));
    if (needs_zeros || has(zeros))
      weight.zeros = part(zeros, "I32", sizes.zeros_bytes, matrix(row_words, groups));
    if (is_gptq)
      weight.zero_offset = config_.choice(of + "checkpoint_format", {"gptq", "gptq_v2"},
                                          config_.text(of + "format", "gptq")) == "gptq";
    require(!is_awq || !has(g_idx), where, " has g_idx, which awq has not");
    if (has(g_idx)) weight.g_idx = groups_of(g_idx, weight.cols, groups);
    return weight;
  }
  // The weight, with its columns sorted by group if it has g_idx: nf4_int4_reorder_cpu, which says
  // what `threads` are, into memory of the Checkpoint. Products of it are faster.
  nf4_int4_tensor sorted(const nf4_int4_tensor &weight, int32_t threads = 0) const {
    if (!weight.g_idx) return weight;
    nf4_int4_tensor to = weight;
    to.g_idx = nullptr;
    to.packed = keep(sizes_of(weight).packed_bytes);
    to.permutation = keep<int32_t>(weight.cols * 4);
    check(nf4_int4_reorder_cpu(&weight, &to, threads));
    return to;
  }

 private:
  static constexpr const char *kNf4 = ".quant_state.bitsandbytes__nf4",
                              *kFp4 = ".quant_state.bitsandbytes__fp4";
  struct Unmap {
    size_t bytes;
    void operator()(void *memory) const { munmap(memory, bytes); }
  };

  static bool exists(const std::string &path) { return access(path.c_str(), F_OK) == 0; }
  static std::set<std::string> files_of(const std::string &path) {
    std::error_code error;
    if (!std::filesystem::is_directory(path, error)) return {path};
    const std::string single = path + "/model.safetensors", index = single + ".index.json";
    if (exists(single)) return {single};  // before an index, as transformers does
    Json json = exists(index) ? parse(index) : Json();
    std::set<std::string> files;
    for (auto &[tensor, file] : json.members["weight_map"].members) {
      file.name = index + ": " + tensor;
      const std::string name = file.text("");
      require(name.find('/') == name.npos, file.name, " is in ", name, ", which is no file's name");
      files.insert(path + "/" + name);
    }
    require(!files.empty() || !exists(index), index, ": it has no weight_map");
    if (!files.empty()) return files;
    for (const auto &file : std::filesystem::directory_iterator(path, error))
      if (file.path().extension() == ".safetensors") files.insert(file.path());
    require(files.size() == 1, path, ": neither model.safetensors nor its index, but ",
            files.size(), " other safetensors files");
    return files;
  }
  static Json parse(const std::string &path) {
    std::ifstream file(path);
    require(file.good(), path, ": cannot be read");
    return {path, std::string(std::istreambuf_iterator<char>(file), {})};
  }
  static std::string module_of(const std::string &name) { return name.substr(0, name.rfind('.')); }
  static void same_shape(const std::string &name, const Shape &found, const Shape &expected) {
    require(expected.empty() || found == expected, name, " has the shape ", text(found),
            "; expected ", text(expected));
  }
  // `first` times all sizes; -1, which no size is, if that is more than 2^63 - 1.
  static int64_t product(const Shape &shape, int64_t first) {
    for (const int64_t size : shape)
      if (__builtin_mul_overflow(first, size, &first)) return -1;
    return first;
  }
  // 8 bytes: the size of the header, which is JSON: tensors by name. Then their data.
  void map(const std::string &path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // no wait for a FIFO
    require(file >= 0, path, ": cannot be read: ", std::strerror(errno));
    struct stat status{};
    const bool is_file = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
    const uint64_t size = is_file ? status.st_size : 0;
    void *memory = size < 8 ? nullptr : mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    const int error = errno;
    close(file);
    require(is_file, path, ": it is not a regular file");
    require(memory != MAP_FAILED, path, ": cannot be mapped: ", std::strerror(error));
    files_.emplace_back(memory, Unmap{size});
    const auto *bytes = static_cast<const uint8_t *>(memory);
    uint64_t header = UINT64_MAX;
    if (memory) std::memcpy(&header, bytes, 8);
    require(memory && header <= size - 8, path, ": the file is shorter than its header says");
    require(header <= 100'000'000, path, ": its header is larger than 100 MB");
    const uint64_t begin = 8 + header;
    Json json(path, {reinterpret_cast<const char *>(bytes) + 8, header});
    require(json.word == "{}", path, ": its header is no object");
    int64_t taken = 0;
    for (auto &[name, entry] : json.members) {
      if (name == "__metadata__") continue;
      entry.name = path + ": " + name;
      const Shape offsets = entry.sizes("data_offsets");
      require(offsets.size() == 2 && offsets[0] <= offsets[1] &&
                  static_cast<uint64_t>(offsets[1]) <= size - begin,
              entry.name, " lies outside the file");
      const StoredTensor tensor{entry.name, entry.text("dtype"), entry.sizes("shape"),
                                bytes + begin + offsets[0], offsets[1] - offsets[0]};
      const size_t letters = std::min(tensor.dtype.find_first_of("123468"), tensor.dtype.size());
      const int64_t bits =
          tensor.dtype == "BOOL" ? 8 : std::strtol(&tensor.dtype[letters], nullptr, 10);
      require(bits > 0 && product(tensor.shape, bits) == tensor.bytes * 8, entry.name, " has ",
              tensor.bytes, " bytes for ", tensor.dtype, " of shape ", text(tensor.shape));
      const auto [at, is_new] = tensors_.emplace(name, tensor);
      require(is_new, entry.name, " is in two files, also in ", at->second.name);
      taken += tensor.bytes;
    }
    require(static_cast<uint64_t>(taken) == size - begin, path, ": its tensors take ", taken,
            " bytes, and it has ", size - begin);
  }
  // A part of a weight: where it is mapped, or a copy where that is not 4-byte aligned.
  template <class T = void>
  T *part(const std::string &name, const std::string &dtype, int64_t bytes,
          const Shape &shape = {}) const {
    const StoredTensor &found = tensor(name, shape);
    require(dtype.empty() || found.dtype == dtype, found.name, " is ", found.dtype, "; expected ",
            dtype);
    require(found.bytes == bytes, found.name, " has ", found.bytes, " bytes; expected ", bytes);
    const bool is_aligned = reinterpret_cast<uintptr_t>(found.data) % 4 == 0;
    const void *data = is_aligned ? found.data : std::memcpy(keep(bytes), found.data, bytes);
    return static_cast<T *>(const_cast<void *>(data));
  }
  // g_idx, checked, since nf4.h does not; NULL where columns are in order.
  const int32_t *groups_of(const std::string &name, int64_t cols, int64_t groups) const {
    const auto *found = part<int32_t>(name, "I32", cols * 4, {cols});
    std::vector<int64_t> columns(groups);
    bool in_order = true;
    for (int64_t k = 0; k < cols; ++k) {
      require(0 <= found[k] && found[k] < groups, tensor(name).name, ": column ", k,
              " is of group ", found[k], "; there are ", groups);
      ++columns[found[k]];
      in_order &= found[k] == k / (cols / groups);
    }
    const auto same = std::count(columns.begin(), columns.end(), cols / groups);
    require(same == groups, tensor(name).name, ": groups are not of one size");
    return in_order ? nullptr : found;
  }
  // Memory for as long as the Checkpoint.
  template <class T = uint32_t>
  T *keep(size_t bytes) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    void *memory = kept_.emplace_back(std::make_unique<uint32_t[]>((bytes + 3) / 4)).get();
    return static_cast<T *>(memory);
  }

  std::string path_;
  Json config_;
  std::vector<std::unique_ptr<void, Unmap>> files_;
  std::map<std::string, StoredTensor> tensors_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<uint32_t[]>> kept_;
};

}  // namespace nf4

#endif
