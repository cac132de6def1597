// include/nf4/checkpoint.hpp: what it reads, and the sentence for each thing that is wrong.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nf4/checkpoint.hpp>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"

namespace {

namespace fs = std::filesystem;

// A folder that is removed at the end.
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

// A safetensors file. `pad`: blanks that end its header, which shift all data.
std::string file_of(const std::vector<Tensor> &tensors, size_t pad = 0) {
  std::string header = "{\"__metadata__\":{\"dtype\":\"x\"}", data;
  for (const Tensor &each : tensors) {
    const std::string begin = std::to_string(data.size());
    data += each.data;
    header += ",\"" + each.name + "\":{\"dtype\":\"" + each.dtype + "\",\"shape\":[" + each.shape +
              "],\"data_offsets\":[" + begin + "," + std::to_string(data.size()) + "]}";
  }
  header += "}" + std::string(7 - (header.size() % 8) + pad, ' ');
  const uint64_t size = header.size();
  return std::string(reinterpret_cast<const char *>(&size), 8) + header + data;
}
// With this header as it is.
std::string file_of(const std::string &header, const std::string &data = "") {
  const uint64_t size = header.size();
  return std::string(reinterpret_cast<const char *>(&size), 8) + header + data;
}

template <class T>
std::string bytes_of(const std::vector<T> &values) {
  return {reinterpret_cast<const char *>(values.data()), values.size() * sizeof(T)};
}

// What is thrown; "" if nothing is.
template <class Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const nf4::Error &error) {
    return error.what();
  }
  return "";
}
bool has(const std::string &text, const std::string &part) {
  INFO(text);
  const bool found = text.find(part) != text.npos;
  CHECK(found);
  return found;
}
// What a folder's model.safetensors of these bytes is refused with.
std::string refusal(const std::string &bytes) {
  const Folder folder;
  folder.write("model.safetensors", bytes);
  return error_of([&] { nf4::Checkpoint checkpoint(folder.path); });
}

// A flat weight of 2 x 32 in NF4 or, with a codebook of its own, FP4; `state` replaces its JSON.
std::vector<Tensor> flat(const std::string &state = "", const std::string &type = "nf4") {
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
std::vector<Tensor> nested(const std::string &state = kNested) {
  std::vector<Tensor> tensors = flat(state);
  tensors[1] = {"a.weight.absmax", "U8", "2", "\x01\x02"};
  tensors.push_back({"a.weight.nested_absmax", "F32", "1", bytes_of<float>({1})});
  tensors.push_back(
      {"a.weight.nested_quant_map", "F32", "256", bytes_of(std::vector<float>(256, 0.25f))});
  return tensors;
}
// The weight, dequantized, or the error.
std::string read(const std::vector<Tensor> &tensors, size_t pad = 0) {
  const Folder folder;
  folder.write("model.safetensors", file_of(tensors, pad));
  return error_of([&] {
    const nf4::Checkpoint checkpoint(folder.path);
    REQUIRE(checkpoint.is_nf4("a.weight"));
    const nf4_tensor weight = checkpoint.nf4_weight("a.weight", {2, 32});
    float out[64];
    nf4::check(nf4_dequant_cpu(&weight, out, NF4_DTYPE_FP32, 1));
    const bool is_nested = weight.nested_blocksize != 0;
    CHECK(out[0] == nf4_codebook(weight.format)[7] * (is_nested ? 0.75f : 1.0f));
    CHECK(out[63] == nf4_codebook(weight.format)[0] * (is_nested ? 0.75f : 2.0f));
    CHECK(weight.codebook == nullptr);
  });
}

// 16 x 16 in two groups of columns, each code 9, each zero point 8 (7 as GPTQ v1 stores it).
std::vector<Tensor> gptq(const std::vector<int32_t> &g_idx = {}) {
  std::vector<Tensor> tensors{
      {"a.qweight", "I32", "2,16", std::string(128, '\x99')},
      {"a.qzeros", "I32", "2,2", std::string(16, '\x77')},
      {"a.scales", "F16", "2,16", bytes_of(std::vector<uint16_t>(32, 0x3c00))}};
  if (!g_idx.empty()) tensors.push_back({"a.g_idx", "I32", "16", bytes_of(g_idx)});
  return tensors;
}
std::vector<Tensor> compressed(std::vector<int64_t> shape = {16, 16}) {
  return {{"a.weight_shape", "I64", "2", bytes_of(shape)},
          {"a.weight_packed", "I32", "16,2", std::string(128, '\x99')},
          {"a.weight_scale", "BF16", "16,2", bytes_of(std::vector<uint16_t>(32, 0x3f80))}};
}
// The descriptor's dequantized first number, after `change`; and the error.
std::string read_int4(const std::vector<Tensor> &tensors, const std::string &config = "",
                      float expected = 1, nf4_int4_layout layout = NF4_INT4_GPTQ) {
  const Folder folder;
  folder.write("model.safetensors", file_of(tensors));
  if (!config.empty()) folder.write("config.json", "{\"quantization_config\":" + config + "}");
  return error_of([&] {
    const nf4::Checkpoint checkpoint(folder.path);
    REQUIRE(checkpoint.is_int4("a.weight"));
    const nf4_int4_tensor stored = checkpoint.int4_weight("a.weight", {16, 16});
    CHECK(stored.layout == layout);
    for (const nf4_int4_tensor &weight : {stored, checkpoint.sorted(stored, 1)}) {
      float out[256];
      nf4::check(nf4_int4_dequant_cpu(&weight, out, NF4_DTYPE_FP32, 1));
      CHECK((out[0] == expected && out[255] == expected));
    }
    CHECK((checkpoint.sorted(stored, 1).permutation != nullptr) == (stored.g_idx != nullptr));
  });
}

}  // namespace

TEST_CASE("files of a folder", "[checkpoint]") {
  const Folder folder;
  const auto names = [&](const std::string &path) {
    return nf4::Checkpoint(path).tensors().begin()->first;
  };
  const auto error = [&] { return error_of([&] { nf4::Checkpoint checkpoint(folder.path); }); };
  has(error(), "neither model.safetensors nor its index, but 0 other safetensors files");
  has(error_of([&] { nf4::Checkpoint checkpoint(folder.path + "/none"); }), "none: cannot be read");
  folder.write("x.safetensors", file_of({{"x", "U8", "1", "1"}}));
  CHECK(names(folder.path) == "x");
  CHECK(names(folder.path + "/x.safetensors") == "x");
  folder.write("y.safetensors", file_of({{"y", "U8", "1", "1"}}));
  has(error(), "but 2 other");
  const std::string index = "model.safetensors.index.json";
  folder.write(index, R"({"weight_map":{"y":"y.safetensors"}})");
  CHECK(names(folder.path) == "y");
  folder.write(index, R"({"weight_map":{"y":"../y.safetensors"}})");
  has(error(), "which is no file's name");
  folder.write(index, R"({"weight_map":{"y":1}})");
  has(error(), "index.json: y:  is 1");
  folder.write(index, R"({"weight_map":{"y":"none"}})");
  has(error(), "none: cannot be read: No such file");
  folder.write(index, "{}");
  has(error(), "it has no weight_map");
  folder.write("z.safetensors", file_of({{"y", "U8", "1", "1"}}));
  folder.write(index, R"({"weight_map":{"y":"y.safetensors","z":"z.safetensors"}})");
  has(error(), "z.safetensors: y is in two files, also in ");
  folder.write("model.safetensors", file_of({{"m", "U8", "1", "1"}}));
  CHECK(names(folder.path) == "m");
  const nf4::Checkpoint checkpoint(folder.path);
  has(error_of([&] { checkpoint.config(); }), "config.json: cannot be read");
  has(error_of([&] { checkpoint.tensor("q"); }), "has no tensor q");
  has(error_of([&] { checkpoint.tensor("m", {2}); }), "m has the shape [1]; expected [2]");
  has(error_of([&] { checkpoint.dense("m"); }), "m is U8; F32, BF16 and F16 are read");
  folder.write("config.json", "{} x");
  has(error(), "config.json: not JSON at 'x'");
  fs::remove(folder.path + "/model.safetensors");
  fs::create_directory(folder.path + "/model.safetensors");
  fs::remove(folder.path + "/config.json");
  has(error(), "it is not a regular file");
}

TEST_CASE("files that break the format", "[checkpoint]") {
  const std::string good = file_of({{"a", "F32", "2", std::string(8, 'a')}});
  CHECK(refusal(good).empty());
  CHECK(refusal(file_of("{}")).empty());
  for (size_t size = 0; size < good.size() - 8; ++size)
    has(refusal(good.substr(0, size)), "the file is shorter than its header says");
  has(refusal(good.substr(0, good.size() - 1)), "a lies outside the file");
  has(refusal(good + "x"), "its tensors take 8 bytes, and it has 9");
  has(refusal(std::string(16, '\xff')), "the file is shorter than its header says");
  has(refusal(file_of("not JSON")), "model.safetensors: not JSON at 'JSON'");
  has(refusal(file_of("[]")), "its header is no object");
  const auto entry = [](const std::string &text) {
    return refusal(file_of("{\"a\":{" + text + "}}", "12345678"));
  };
  const std::string offsets = R"("data_offsets":[0,8])";
  has(entry(offsets + R"(,"shape":[8])"), "a: dtype is missing");
  has(entry(offsets + R"(,"dtype":"U8")"), "a: shape is no array");
  has(entry(R"("dtype":"U8","shape":[8])"), "a: data_offsets is no array");
  has(entry(offsets + R"(,"dtype":"Q","shape":[8])"), "a has 8 bytes for Q of shape [8]");
  has(entry(offsets + R"(,"dtype":"F99999999999","shape":[8])"), "a has 8 bytes for F9999");
  has(entry(offsets + R"(,"dtype":"F32","shape":[3])"), "a has 8 bytes for F32 of shape [3]");
  has(entry(offsets + R"(,"dtype":"U8","shape":[-8])"), "a: shape/0 is -8");
  has(entry(offsets + R"(,"dtype":"U8","shape":[8.0])"), "a: shape/0 is 8.0");
  has(entry(offsets + R"(,"dtype":"U8","shape":[9223372036854775807,2])"), "a has 8 bytes for U8");
  has(entry(offsets + R"(,"dtype":"U8","shape":[9223372036854775808])"), "a: shape/0 is 92233");
  for (const char *each : {"8,0", "0,9", "0", "0,9223372036854775807"})
    has(entry(R"("dtype":"U8","shape":[8],"data_offsets":[)" + std::string(each) + "]"),
        "a lies outside the file");
}

TEST_CASE("dense tensors", "[checkpoint]") {
  const std::vector<uint16_t> halves{0x3c00, 0xc000, 0x0001, 0x7c00, 0xfc00, 0x7e00};
  for (const size_t pad : {0, 1}) {
    const Folder folder;
    folder.write("model.safetensors",
                 file_of({{"h", "F16", "6", bytes_of(halves)},
                          {"b", "BF16", "1,2", bytes_of<uint16_t>({0x3f80, 0xc000})},
                          {"f", "F32", "", bytes_of<float>({1.5f})}},
                         pad));
    const nf4::Checkpoint checkpoint(folder.path);
    const std::vector<float> h = checkpoint.dense("h", {6});
    CHECK((h[0] == 1 && h[1] == -2 && h[2] == 0x1p-24f && std::isinf(h[3]) && h[3] > 0));
    CHECK((std::isinf(h[4]) && h[4] < 0 && std::isnan(h[5])));
    CHECK(checkpoint.dense<double>("b", {1, 2}) == std::vector<double>{1, -2});
    CHECK(checkpoint.dense("f") == std::vector<float>{1.5f});
  }
}

TEST_CASE("NF4 and FP4", "[checkpoint]") {
  for (const size_t pad : {0, 1, 2, 3}) {
    CHECK(read(flat(), pad).empty());
    CHECK(read(flat("", "fp4"), pad).empty());
    CHECK(read(nested(), pad).empty());
  }
  const auto changed = [](std::vector<Tensor> tensors, size_t which, const Tensor &to) {
    tensors[which] = to;
    return read(tensors);
  };
  has(changed(flat(), 0, {"b", "U8", "1", "x"}), "has no tensor a.weight");
  has(changed(flat(), 0, {"a.weight", "U8", "31", std::string(31, 'x')}),
      "a.weight has 31 bytes; expected 32");
  has(changed(flat(), 1, {"a.weight.absmax", "U8", "8", "12345678"}),
      "a.weight.absmax is U8; expected F32");
  has(changed(flat(), 1, {"a.weight.absmax", "F32", "1", "1234"}), "has 4 bytes; expected 8");
  has(changed(nested(), 4, {"b", "U8", "1", "x"}), "has no tensor a.weight.nested_absmax");
  // A code 8 of +0, as bitsandbytes writes FP4's, is the format's; another number is a codebook.
  const Folder folder;
  std::vector<Tensor> own = flat();
  own[2].data = std::string(64, '\0');
  folder.write("model.safetensors", file_of(own));
  CHECK(nf4::Checkpoint(folder.path).nf4_weight("a.weight").codebook != nullptr);
  std::vector<Tensor> both = flat();
  both.push_back({"a.weight.quant_state.bitsandbytes__fp4", "U8", "2", "{}"});
  has(read(both), "the weight has one of nf4, too");

  const auto state = [](const std::string &from, const std::string &to) {
    std::string json = kNested;
    return read(nested(json.replace(json.find(from), from.size(), to)));
  };
  has(state("{", "x"), "bitsandbytes__nf4: not JSON");
  has(state("\"nf4\"", "\"fp4\""), "quant_type is fp4; expected: nf4");
  has(state("float16", "int8"), "dtype is int8; expected: float32");
  has(state("[2,32]", "[32,2]"), "a.weight has the shape [32, 2]; expected [2, 32]");
  has(state("[2,32]", "[]"), "shape is empty");
  has(state("\"blocksize\":32", "\"blocksize\":33"), "bitsandbytes__nf4: NF4_STATUS_INVALID");
  has(state("\"blocksize\":32", "\"blocksize\":4294967328"), "blocksize is 4294967328");
  has(state("256", "0"), "nested_blocksize is 0");
  has(state("\"nested_blocksize\":256,", ""), "nested_blocksize is missing");
  has(state("float32", "float16"), "nested_dtype is float16");
  has(state("0.5", "1e39"), "nested_offset is 1e+39");
  has(state("0.5", "NaN"), "nested_offset is NaN");
}

TEST_CASE("descriptors of no shape that is given", "[checkpoint]") {
  const Folder folder;
  std::vector<Tensor> tensors = flat(
      R"({"quant_type":"nf4","blocksize":32,"dtype":"float16","shape":[9223372036854775807,2,32]})");
  folder.write("model.safetensors", file_of(tensors));
  const nf4::Checkpoint huge(folder.path);
  has(error_of([&] { huge.nf4_weight("a.weight"); }), "rows is -1");
  tensors = flat(R"({"quant_type":"nf4","blocksize":32,"dtype":"float16","shape":[2,2,16]})");
  folder.write("model.safetensors", file_of(tensors));
  const nf4_tensor weight = nf4::Checkpoint(folder.path).nf4_weight("a.weight");
  CHECK((weight.rows == 4 && weight.cols == 16));
}

TEST_CASE("integers of checkpoints", "[checkpoint]") {
  const std::string v1 = R"({"quant_method":"gptq"})", awq_config = R"({"quant_method":"awq"})",
                    v2 = R"({"quant_method":"gptq","checkpoint_format":"gptq_v2"})";
  const std::vector<int32_t> order{0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1},
      plain{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  CHECK(read_int4(gptq(), v1).empty());
  CHECK(read_int4(gptq()).empty());
  CHECK(read_int4(gptq(plain)).empty());
  CHECK(read_int4(gptq(order), v1).empty());
  CHECK(read_int4(gptq(), v2, 2).empty());
  CHECK(read_int4(gptq(), R"({"quant_method":"gptq","format":"gptq_v2"})", 2).empty());
  CHECK(read_int4(compressed(), "", 1, NF4_INT4_COMPRESSED_TENSORS).empty());
  std::vector<Tensor> awq = gptq();
  awq[0].shape = "16,2";
  CHECK(read_int4(awq, awq_config, 2, NF4_INT4_AWQ).empty());
  CHECK(read_int4(awq, "", 2, NF4_INT4_AWQ).empty());

  has(read_int4(gptq(), awq_config), "the weight has the shape [128, 2]; expected [16, 16]");
  has(read_int4(compressed(), v1), "a.weight_packed: the weight is not of gptq");
  has(read_int4(gptq(), R"({"quant_method":"gptq","checkpoint_format":"marlin"})"),
      "checkpoint_format is marlin; expected: gptq, gptq_v2");
  has(read_int4(gptq({1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1})), "not of one size");
  has(read_int4(gptq({2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1})),
      "a.g_idx: column 0 is of group 2; there are 2");
  has(read_int4(gptq({0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, -1})), "is of group -1");
  has(read_int4(compressed({-16, -16})), "has the shape [-16, -16]; expected");
  has(read_int4(compressed({16, 24})), "has the shape [16, 24]; expected");
  const auto changed = [&](size_t which, const Tensor &to) {
    std::vector<Tensor> tensors = gptq();
    tensors[which] = to;
    return read_int4(tensors);
  };
  has(changed(0, {"a.qweight", "F32", "2,16", std::string(128, 'x')}), "a.qweight is F32");
  has(changed(0, {"a.qweight", "I32", "32", std::string(128, 'x')}), "expected matrices");
  has(changed(1, {"b", "U8", "1", "x"}), "has no tensor a.qzeros");
  has(changed(1, {"a.qzeros", "I32", "4,1", std::string(16, 'x')}),
      "a.qzeros has the shape [4, 1]");
  has(changed(2, {"a.scales", "F32", "2,16", std::string(128, 'x')}), "a.scales is F32");
  has(changed(2, {"a.scales", "F16", "16,2", std::string(64, 'x')}),
      "a.scales has the shape [16, 2]; expected");
  has(changed(2, {"a.scales", "F16", "3,16", std::string(96, 'x')}), "and 3 groups of columns");
  has(changed(2, {"a.scales", "F16", "0,16", ""}), "and 0 groups of columns");
}

TEST_CASE("parts in other memory, and products of both kinds", "[checkpoint]") {
  const Folder folder;
  std::vector<Tensor> tensors = nested();
  for (const Tensor &each : gptq()) tensors.push_back(each);
  folder.write("model.safetensors", file_of(tensors));
  std::vector<std::string> copies;
  copies.reserve(16);
  const auto copy = [&](const void *part, int64_t bytes) -> void * {
    return copies.emplace_back(static_cast<const char *>(part), bytes).data();
  };
  nf4_tensor weight;
  nf4_int4_tensor integers;
  {
    const nf4::Checkpoint checkpoint(folder.path);
    weight = nf4::copy_parts(checkpoint.nf4_weight("a.weight"), copy);
    integers = nf4::copy_parts(checkpoint.int4_weight("a.weight"), copy);
  }
  CHECK(copies.size() == 5 + 3);
  nf4::Products products;
  const std::vector<float> x(32, 1.0f);
  float y[18];
  nf4_matmul_args args{sizeof args, NF4_DTYPE_FP32, 0, 0, x.data(), 32, nullptr, y, 18, nullptr};
  products.add(weight, args);
  args.y = y + 2;
  products.add(integers, args);
  products.set_rows(1);
  nf4::Products moved = std::move(products);
  moved.cpu(1);
  CHECK(y[0] ==
        Approx(16 * 0.75f * (nf4_codebook(NF4_FORMAT_NF4)[7] + nf4_codebook(NF4_FORMAT_NF4)[0])));
  CHECK((y[2] == 16 && y[17] == 16));
  moved.workspace_size();
  moved.set_rows(-1);
  has(error_of([&] { moved.cpu(1); }), "NF4_STATUS_INVALID_ARGUMENT: ");
}

TEST_CASE("a checkpoint from many threads", "[checkpoint][threads]") {
  const Folder folder;
  folder.write("model.safetensors", file_of(nested(), 1));
  const nf4::Checkpoint checkpoint(folder.path);
  std::vector<std::thread> threads;
  std::vector<float> offsets(8);
  for (float &offset : offsets)
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) offset = *checkpoint.nf4_weight("a.weight").nested_offset;
    });
  for (std::thread &thread : threads) thread.join();
  CHECK(offsets == std::vector<float>(8, 0.5f));
}
