// Folders of checkpoints in safetensors, and small weights of each kind.
#pragma once

#include <nf4/nf4.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/catch.hpp"

namespace fs = std::filesystem;

// A folder that is removed at the end of its scope.
struct Folder {
  std::string path = (fs::temp_directory_path() / "nf4_XXXXXX").string();

  Folder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~Folder() { fs::remove_all(path); }
  void write(const std::string &name, const std::string &bytes) const {
    std::ofstream(path + "/" + name, std::ios::binary) << bytes;
  }
};

struct Tensor {
  std::string name, dtype, shape, data;
};

// A safetensors file with exactly this header.
inline std::string file_of(const std::string &header, const std::string &data = "") {
  const uint64_t size = header.size();
  return std::string(reinterpret_cast<const char *>(&size), 8) + header + data;
}
// A safetensors file with these tensors. `pad` blanks end its header, which shifts all data.
inline std::string file_of(const std::vector<Tensor> &tensors, size_t pad = 0) {
  std::string header = "{\"__metadata__\":{\"dtype\":\"x\"}", data;
  for (const Tensor &each : tensors) {
    const std::string begin = std::to_string(data.size());
    data += each.data;
    header += ",\"" + each.name + "\":{\"dtype\":\"" + each.dtype + "\",\"shape\":[" + each.shape +
              "],\"data_offsets\":[" + begin + "," + std::to_string(data.size()) + "]}";
  }
  header += "}" + std::string(7 - (header.size() % 8) + pad, ' ');
  return file_of(header, data);
}

template <class T>
inline std::string bytes_of(const std::vector<T> &values) {
  return {reinterpret_cast<const char *>(values.data()), values.size() * sizeof(T)};
}

// A flat weight of 2 x 32 in NF4 or, with a codebook of its own, FP4; `state` replaces its JSON.
inline std::vector<Tensor> flat(const std::string &state = "", const std::string &type = "nf4") {
  const nf4_format format = type == "nf4" ? NF4_FORMAT_NF4 : NF4_FORMAT_FP4;
  const std::vector<float> map(nf4_codebook(format), nf4_codebook(format) + 16);
  const std::string json =
      state.empty()
          ? R"({"quant_type":")" + type + R"(","blocksize":32,"dtype":"float16","shape":[2,32]})"
          : state;
  return {{"a.weight", "U8", "32,1", std::string(32, '\x70')},
          {"a.weight.absmax", "F32", "2", bytes_of<float>({1, 2})},
          {"a.weight.quant_map", "F32", "16", bytes_of(map)},
          {"a.weight.quant_state.bitsandbytes__" + type, "U8", std::to_string(json.size()), json}};
}
const char *const kNested =
    R"({"quant_type":"nf4","blocksize":32,"dtype":"float16","shape":[2,32],"nested_blocksize":256,)"
    R"("nested_dtype":"float32","nested_offset":0.5})";
inline std::vector<Tensor> nested(const std::string &state = kNested) {
  std::vector<Tensor> tensors = flat(state);
  tensors[1] = {"a.weight.absmax", "U8", "2", "\x01\x02"};
  tensors.push_back({"a.weight.nested_absmax", "F32", "1", bytes_of<float>({1})});
  tensors.push_back(
      {"a.weight.nested_quant_map", "F32", "256", bytes_of(std::vector<float>(256, 0.25f))});
  return tensors;
}
// 16 x 16 in two groups of columns, each code 9, each zero point 8 (7 as GPTQ v1 stores it).
inline std::vector<Tensor> gptq(const std::vector<int32_t> &g_idx = {},
                                const std::string &module = "a") {
  std::vector<Tensor> tensors{
      {module + ".qweight", "I32", "2,16", std::string(128, '\x99')},
      {module + ".qzeros", "I32", "2,2", std::string(16, '\x77')},
      {module + ".scales", "F16", "2,16", bytes_of(std::vector<uint16_t>(32, 0x3c00))}};
  if (!g_idx.empty()) tensors.push_back({module + ".g_idx", "I32", "16", bytes_of(g_idx)});
  return tensors;
}
inline std::vector<Tensor> compressed(std::vector<int64_t> shape = {16, 16}) {
  return {{"a.weight_shape", "I64", "2", bytes_of(shape)},
          {"a.weight_packed", "I32", "16,2", std::string(128, '\x99')},
          {"a.weight_scale", "BF16", "16,2", bytes_of(std::vector<uint16_t>(32, 0x3f80))}};
}
