// Checkpoints for engines in C++17: reads the tensors of safetensors files, and makes descriptors
// of nf4.h for the 4-bit weights among them. It is header-only and needs POSIX, the standard
// library and nf4.h. It is compiled into the program and is not part of the ABI.
//
//   const nf4::Checkpoint checkpoint("model/");
//   const nf4_tensor weight = checkpoint.nf4_weight("model.layers.0.mlp.up_proj.weight");
//
// LIFETIMES  Pointers, also those in descriptors, point to mapped files (with FileAccess::kRead, to
//            memory that the files were read into) or to copies that the Checkpoint owns. It copies
//            g_idx and every part that its file does not align as nf4.h asks; packed bytes of NF4
//            and FP4 need no alignment and are never copied. The memory is read-only, and valid as
//            long as the Checkpoint. Nobody may change mapped files meanwhile: checks are not
//            repeated, and reading a part that was cut off a file raises SIGBUS.
// ERRORS     An nf4::Error says what is wrong and names the file, the tensor or both. If memory is
//            short, std::bad_alloc is thrown.
// THREADS    Const functions may be called from any number of threads at once.
#ifndef NF4_CHECKPOINT_HPP
#define NF4_CHECKPOINT_HPP

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <nf4/int4_config.hpp>
#include <nf4/products.hpp>
#include <nf4/safetensors.hpp>

namespace nf4 {
inline namespace NF4_INLINE_NAMESPACE {

class Checkpoint {
 public:
  // Opens a safetensors file, or the files of a folder or of an index; see CheckpointFiles. Throws
  // if there is none; if a file cannot be read or breaks the format; if a tensor is in two files,
  // or is not in the file that the index names; and if config.json is not a JSON object.
  explicit Checkpoint(const std::string &path, FileAccess file_access = FileAccess::kMap)
      : path_(path) {
    const CheckpointFiles found(path);
    for (const std::string &file : found.paths) open(file, file_access);
    for (const Json &each : found.weight_map.members) {
      const std::string file = found.folder + "/" + each.text("");
      require(has(each.name) && tensors_.at(each.name).name == file + ": " + each.name, found.index,
              ": ", each.name, " is not in ", file);
    }
    if (found.folder.empty()) return;
    // GPTQ, AWQ, AutoRound and ModelOpt tools describe the quantization in files of their own.
    for (const char *name : {"config.json", "quantize_config.json", "quant_config.json",
                             "quantization_config.json", "hf_quant_config.json"}) {
      const std::string file = found.folder + "/" + name;
      if (access(file.c_str(), F_OK) != 0) continue;
      const Json json(file, detail::RegularFile(file).read(16'000'000), true);
      require(json.word == "{}", file, ": it is no object");
      if (name == std::string("config.json"))
        Int4Config::add_places(config_ = json, places_);
      else if (!json.members.empty())
        places_.push_back(json);
    }
  }

  // The config.json of the folder; throws if there is none.
  const Json &config() const {
    require(!config_.word.empty(), path_, "/config.json: cannot be read");
    return config_;
  }
  // All tensors by name, as they are stored, including the parts of weights.
  const std::map<std::string, StoredTensor> &tensors() const { return tensors_; }
  bool has(const std::string &name) const { return tensors_.count(name) != 0; }
  // This and the functions below throw if there is no such tensor, or if it does not have the
  // `shape`, if one is given.
  const StoredTensor &tensor(const std::string &name, const Shape &shape = {}) const {
    require(has(name), path_, " has no tensor ", name);
    const StoredTensor &found = tensors_.at(name);
    same_shape(found.name, found.shape, shape);
    return found;
  }
  // The numbers of an F32, F16 or BF16 tensor, as a T to which a float converts.
  template <class T = float>
  std::vector<T> dense(const std::string &name, const Shape &shape = {}) const {
    const StoredTensor &found = tensor(name, shape);
    const bool is_half = found.dtype == "F16", is_float = found.dtype == "F32";
    require(is_half || is_float || found.dtype == "BF16", found.name, " is ", found.dtype,
            "; F32, BF16 and F16 are read");
    const size_t bytes = is_float ? 4 : 2;
    std::vector<T> values(static_cast<size_t>(found.bytes) / bytes);
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

  // Tells whether this is a weight in NF4 or FP4, as bitsandbytes and `nf4 quantize` store it.
  // Names of weights end with ".weight".
  bool is_nf4(const std::string &name) const { return has(name + kNf4) || has(name + kFp4); }
  // Returns its descriptor: flat or nested, with a codebook if the one in the file differs from the
  // format's. All dimensions but the last count as rows. Throws if parts contradict the
  // quant_state.
  nf4_tensor nf4_weight(const std::string &name, const Shape &shape = {}) const {
    const bool is_fp4 = has(name + kFp4);
    const StoredTensor &stored = tensor(name + (is_fp4 ? kFp4 : kNf4));
    require(!is_fp4 || !has(name + kNf4), stored.name, ": the weight has one of nf4, too");
    require(stored.dtype == "U8" && stored.bytes <= 65536, stored.name, " is ", stored.dtype,
            " of ", stored.bytes, " bytes; expected U8, up to 65536");
    const Json state(stored.name, {reinterpret_cast<const char *>(stored.data),
                                   static_cast<size_t>(stored.bytes)});
    require(state.word == "{}", state.name, " is no object");
    state.choice("quant_type", {is_fp4 ? "fp4" : "nf4"});
    state.choice("dtype", {"float32", "float16", "bfloat16"});
    const Shape dense = state.sizes("shape");
    require(!dense.empty(), state.name, ": shape is empty");
    require(dense.size() <= 32, state.name, ": shape has ", dense.size(), " sizes; 32 are read");
    const StoredTensor &codes = tensor(name);
    same_shape(codes.name, dense, shape);
    const bool is_nested =
        std::any_of(state.members.begin(), state.members.end(),
                    [](const Json &each) { return each.name.rfind("nested_", 0) == 0; });
    for (const char *each : {".nested_absmax", ".nested_quant_map"})
      require(is_nested || !has(name + each), state.name, " is not nested, and there is ", name,
              each);
    nf4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.format = is_fp4 ? NF4_FORMAT_FP4 : NF4_FORMAT_NF4;
    weight.blocksize = static_cast<int32_t>(state.size("blocksize", {}, 4096));
    weight.rows = detail::product({dense.begin(), dense.end() - 1}, 1);
    weight.cols = dense.back();
    if (is_nested)
      weight.nested_blocksize = static_cast<int32_t>(state.size("nested_blocksize", {}, 1 << 30));
    require(!is_nested || weight.nested_blocksize, state.name, ": nested_blocksize is 0");
    const nf4_sizes sizes = sizes_of(weight, state.name);
    const std::vector<std::string> storage{"U8", "I8", "F16", "BF16", "F32", "F64"};
    require(std::count(storage.begin(), storage.end(), codes.dtype), codes.name, " is ",
            codes.dtype, "; packed bytes are not stored as that");
    weight.packed = part<uint8_t>(name, "", sizes.packed_bytes);
    require(codes.shape.size() == 2 && codes.shape[1] == 1, codes.name, " has the shape ",
            text(codes.shape), "; expected a single column");
    if (is_nested)
      weight.absmax = part<uint8_t>(name + ".absmax", "U8", sizes.absmax_bytes);
    else
      weight.absmax = part<float>(name + ".absmax", "F32", sizes.absmax_bytes);
    const auto *codebook = part<float>(name + ".quant_map", "F32", 16 * 4);
    // The comparison is by value: bitsandbytes writes the zero of FP4's code 8 without its sign.
    if (!std::equal(codebook, codebook + 16, nf4_codebook(weight.format)))
      weight.codebook = codebook;
    if (!is_nested) return weight;
    state.choice("nested_dtype", {"float32"});
    const double offset = state.number("nested_offset");
    require(std::abs(offset) <= FLT_MAX, state.name, ": nested_offset is ", offset);
    weight.nested_absmax = part<float>(name + ".nested_absmax", "F32", sizes.nested_blocks * 4);
    weight.nested_code = part<float>(name + ".nested_quant_map", "F32", 256 * 4);
    const float rounded = static_cast<float>(offset);
    weight.nested_offset = keep<float>(stored.name, &rounded, 1);
    return weight;
  }

  // Tells whether this is a weight in integers of GPTQ, AWQ or compressed-tensors. Its tensors have
  // ".qweight" or ".weight_packed" in place of ".weight".
  bool is_int4(const std::string &name) const {
    const std::string module = module_of(name);
    return !module.empty() && (has(module + ".qweight") || has(module + ".weight_packed"));
  }
  // Returns its descriptor. quantization_config gives the layout and the group sizes, wherever a
  // folder has it: in config.json, in a config within that, in quantize_config.json and similar
  // files. If there is none, GPTQ version 1 and AWQ are recognised by their shapes. g_idx is NULL
  // if columns are in order. Throws if parts contradict one another, the layout or
  // quantization_config.
  nf4_int4_tensor int4_weight(const std::string &name, const Shape &shape = {}) const {
    const std::string module = module_of(name);
    require(!module.empty(), path_, ": ", name, " does not end with .weight");
    const bool is_compressed = has(module + ".weight_packed");
    const std::string packed = module + (is_compressed ? ".weight_packed" : ".qweight"),
                      scales = module + (is_compressed ? ".weight_scale" : ".scales"),
                      zeros = module + (is_compressed ? ".weight_zero_point" : ".qzeros"),
                      g_idx = module + (is_compressed ? ".weight_g_idx" : ".g_idx");
    const StoredTensor &codes = tensor(packed), &stored_scales = tensor(scales);
    const std::string where = codes.name + ": the weight";
    require(!has(name), where, " is there as a dense one, too");
    require(codes.shape.size() == 2 && stored_scales.shape.size() == 2, codes.name,
            " has the shape ", text(codes.shape), " and its scales ", text(stored_scales.shape),
            "; expected matrices");
    const bool is_like_awq =
        !has(g_idx) && stored_scales.shape[1] == detail::product({codes.shape[1]}, 8);
    nf4_int4_tensor weight{};
    weight.struct_size = sizeof weight;
    weight.layout = is_compressed ? NF4_INT4_COMPRESSED_TENSORS
                    : is_like_awq ? NF4_INT4_AWQ
                                  : NF4_INT4_GPTQ;
    const bool has_config = !places_.empty();
    if (has_config) weight.layout = int4_config().layout;
    const bool is_awq = weight.layout == NF4_INT4_AWQ, is_gptq = weight.layout == NF4_INT4_GPTQ;
    require(is_compressed == (!is_awq && !is_gptq), where, " is not of ",
            is_awq    ? "awq"
            : is_gptq ? "gptq"
                      : "compressed-tensors");
    require(stored_scales.dtype == "F16" || stored_scales.dtype == "BF16", stored_scales.name,
            " is ", stored_scales.dtype, "; F16 and BF16 are read");
    weight.scales_dtype = stored_scales.dtype == "F16" ? NF4_DTYPE_FP16 : NF4_DTYPE_BF16;
    weight.rows = is_awq ? detail::product({codes.shape[1]}, 8) : codes.shape[1];
    weight.cols = is_awq ? codes.shape[0] : detail::product({codes.shape[0]}, 8);
    if (is_compressed) read_shape(module + ".weight_shape", weight);
    same_shape(where, {weight.rows, weight.cols}, shape);
    const int64_t groups = stored_scales.shape[is_compressed ? 1 : 0];
    require(weight.rows > 0 && groups > 0 && weight.cols >= groups && weight.cols % groups == 0,
            where, " has the shape ", text({weight.rows, weight.cols}), " and ", groups,
            " groups of columns");
    const auto matrix = [is_compressed](int64_t n, int64_t k) {
      return is_compressed ? Shape{n, k} : Shape{k, n};
    };
    same_shape(stored_scales.name, stored_scales.shape, matrix(weight.rows, groups));
    weight.group_size = group_size(where, weight.cols, groups);
    const nf4_int4_sizes sizes = sizes_of(weight, where);
    const int64_t row_words = (weight.rows + 7) / 8, col_words = (weight.cols + 7) / 8;
    weight.packed =
        part<uint32_t>(packed, "I32", sizes.packed_bytes,
                       is_awq ? matrix(row_words, weight.cols) : matrix(weight.rows, col_words));
    weight.scales = part<uint16_t>(scales, "", sizes.scales_bytes);
    weight.zero_offset = is_gptq && !(has_config && int4_config().is_gptq_v2);
    // Without zero points all of them are 8. GPTQ always stores zero points.
    const auto symmetric = has_config ? int4_config().symmetric : std::optional<bool>();
    const bool is_symmetric = symmetric.value_or(false), is_asymmetric = !symmetric.value_or(true);
    require(!is_compressed || !is_symmetric || !has(zeros), where,
            " has zero points, and quantization_config says symmetric");
    if ((is_compressed ? is_asymmetric : is_gptq || !is_symmetric) || has(zeros))
      weight.zeros = part<uint32_t>(zeros, "I32", sizes.zeros_bytes, matrix(row_words, groups));
    if (weight.zeros && is_symmetric) check_symmetric(zeros, weight, row_words);
    require(!is_awq || !has(g_idx), where, " has g_idx, which awq has not");
    if (has(g_idx)) weight.g_idx = groups_of(g_idx, weight.cols, groups);
    return weight;
  }
  // Returns the weight with its columns sorted by group, if it has g_idx; its products are faster.
  // It calls nf4_int4_reorder_cpu, which explains `threads`. Each call allocates new memory, which
  // the Checkpoint owns.
  nf4_int4_tensor sorted(const nf4_int4_tensor &weight, int32_t threads = 0) const {
    if (!weight.g_idx) return weight;
    nf4_int4_tensor to = weight;
    to.g_idx = nullptr;
    std::vector<uint32_t> packed(static_cast<size_t>(sizes_of(weight).packed_bytes + 3) / 4);
    std::vector<uint32_t> order(static_cast<size_t>(weight.cols));
    to.packed = packed.data();
    to.permutation = reinterpret_cast<int32_t *>(order.data());
    check(nf4_int4_reorder_cpu(&weight, &to, threads));
    const std::lock_guard<std::mutex> lock(mutex_);
    // Moved to where it stays.
    for (auto *each : {&packed, &order}) sorted_.push_back(std::move(*each));
    return to;
  }

 private:
  static constexpr const char *kNf4 = ".quant_state.bitsandbytes__nf4",
                              *kFp4 = ".quant_state.bitsandbytes__fp4";
  void open(const std::string &path, FileAccess file_access) {
    SafetensorsFile file(path, file_access);
    tensors_.merge(file.tensors);
    for (const auto &[name, twice] : file.tensors)
      require(false, twice.name, " is in two files, also in ", tensors_.at(name).name);
    files_.push_back(std::move(file));
  }
  // The part before ".weight"; "" for another name.
  static std::string module_of(const std::string &name) {
    const size_t end = name.rfind('.');
    return end != name.npos && name.substr(end) == ".weight" ? name.substr(0, end) : "";
  }
  static void same_shape(const std::string &name, const Shape &found, const Shape &expected) {
    require(expected.empty() || found == expected, name, " has the shape ", text(found),
            "; expected ", text(expected));
  }
  // The contents of quantization_config, read once.
  const Int4Config &int4_config() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!int4_config_) int4_config_.emplace(places_);
    return *int4_config_;
  }
  int32_t group_size(const std::string &where, int64_t cols, int64_t groups) const {
    const int64_t size = cols / groups;
    if (!places_.empty() && !int4_config().group_sizes.empty()) {
      const Shape &said = int4_config().group_sizes;
      for (const int64_t each : said)
        if (each == -1 ? groups == 1 : each == size) return static_cast<int32_t>(each);
      require(false, where, " has groups of ", size, " columns; quantization_config says ",
              text(said));
    }
    return groups == 1 ? -1 : static_cast<int32_t>(std::min<int64_t>(size, INT32_MAX));
  }
  // Reads the shape that compressed-tensors stores, since the last word of a row need not be full.
  void read_shape(const std::string &name, nf4_int4_tensor &weight) const {
    const StoredTensor &found = tensor(name, {2});
    require(found.dtype == "I64" || found.dtype == "I32", found.name, " is ", found.dtype,
            "; I64 and I32 are read");
    int64_t sizes[2];
    int32_t narrow[2];
    std::memcpy(found.dtype == "I64" ? static_cast<void *>(sizes) : narrow, found.data,
                static_cast<size_t>(found.bytes));
    if (found.dtype == "I32") std::copy(narrow, narrow + 2, sizes);
    weight.rows = sizes[0];
    weight.cols = sizes[1];
  }
  // Checks that all zero points are 8 if quantization_config says so.
  void check_symmetric(const std::string &name, const nf4_int4_tensor &weight,
                       int64_t row_words) const {
    const StoredTensor &stored = tensor(name);
    const auto *words = static_cast<const uint32_t *>(weight.zeros);
    for (int64_t i = 0; i < stored.bytes / 4; ++i) {
      const bool is_last = i % row_words == row_words - 1 && weight.rows % 8;
      const uint32_t rows = is_last ? (1u << 4 * (weight.rows % 8)) - 1 : ~0u;
      const uint32_t found = words[i] + (weight.zero_offset ? 0x11111111u : 0);
      require(((found ^ 0x88888888u) & rows) == 0, stored.name,
              ": zero points are not 8, and quantization_config says symmetric",
              weight.layout == NF4_INT4_GPTQ ? "; or checkpoint_format is wrong" : "");
    }
  }
  // Returns a part of a weight in the mapped file, or a copy if it is not aligned for a T.
  template <class T>
  T *part(const std::string &name, const std::string &dtype, int64_t bytes,
          const Shape &shape = {}) const {
    const StoredTensor &found = tensor(name, shape);
    require(dtype.empty() || found.dtype == dtype, found.name, " is ", found.dtype, "; expected ",
            dtype);
    require(found.bytes == bytes, found.name, " has ", found.bytes, " bytes; expected ", bytes);
    const bool is_aligned = reinterpret_cast<uintptr_t>(found.data) % alignof(T) == 0;
    if (!is_aligned) return keep<T>(name, found.data, static_cast<size_t>(bytes) / sizeof(T));
    return reinterpret_cast<T *>(const_cast<uint8_t *>(found.data));
  }
  // Returns g_idx as a checked copy, since nf4.h does not check it; NULL if columns are in order.
  const int32_t *groups_of(const std::string &name, int64_t cols, int64_t groups) const {
    const StoredTensor &stored = tensor(name, {cols});
    require(stored.dtype == "I32", stored.name, " is ", stored.dtype, "; expected I32");
    std::vector<int32_t> found(static_cast<size_t>(cols));
    std::memcpy(found.data(), stored.data, static_cast<size_t>(stored.bytes));
    std::vector<int64_t> columns(static_cast<size_t>(groups));
    bool in_order = true;
    int64_t k = 0;
    for (const int32_t group : found) {
      require(0 <= group && group < groups, stored.name, ": column ", k, " is of group ", group,
              "; there are ", groups);
      ++columns[static_cast<size_t>(group)];
      in_order &= group == k++ / (cols / groups);
    }
    const auto same = std::count(columns.begin(), columns.end(), cols / groups);
    require(same == groups, stored.name, ": groups are not of one size");
    return in_order ? nullptr : keep<int32_t>(name, found.data(), found.size());
  }
  // Keeps a copy for as long as the Checkpoint exists; the same name returns the same copy.
  template <class T>
  T *keep(const std::string &name, const void *data, size_t count) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<uint32_t[]> &memory = kept_[name];
    if (!memory) {
      memory = std::make_unique<uint32_t[]>((count * sizeof(T) + 3) / 4);
      std::memcpy(memory.get(), data, count * sizeof(T));
    }
    return reinterpret_cast<T *>(memory.get());
  }

  std::string path_;
  Json config_;
  std::vector<Json> places_;  // configs that describe the quantization
  std::vector<SafetensorsFile> files_;
  std::map<std::string, StoredTensor> tensors_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, std::unique_ptr<uint32_t[]>> kept_;
  mutable std::list<std::vector<uint32_t>> sorted_;
  mutable std::optional<Int4Config> int4_config_;
};

}  // namespace NF4_INLINE_NAMESPACE
}  // namespace nf4

#endif
