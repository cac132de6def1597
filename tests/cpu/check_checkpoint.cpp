// include/nf4/checkpoint.hpp: what it reads, and the sentence for each thing that is wrong.
#include <nf4/checkpoint.hpp>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/checkpoint_files.hpp"
#include "support/error_of.hpp"

namespace {

// The message with which a folder's model.safetensors of these bytes is refused.
std::string refusal(const std::string &bytes) {
  const Folder folder;
  folder.write("model.safetensors", bytes);
  return error_of([&] { nf4::Checkpoint checkpoint(folder.path); });
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
  for (const char *text : {"{}", R"({"weight_map":["y.safetensors"]})", R"({"weight_map":{}})"}) {
    folder.write(index, text);
    has(error(), "it has no weight_map");
  }
  for (const char *name : {"", ".", ".."}) {
    folder.write(index, R"({"weight_map":{"y":")" + std::string(name) + "\"}}");
    has(error(), "which is no file's name");
  }
  folder.write(index, R"({"weight_map":{"x":"x.safetensors","y":"x.safetensors"}})");
  has(error(), "index.json: y is not in " + folder.path + "/x.safetensors");
  folder.write(index, R"({"weight_map":{"x":"y.safetensors","y":"x.safetensors"}})");
  has(error(), "index.json: x is not in " + folder.path + "/y.safetensors");
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
  folder.write("config.json", "[]");
  has(error(), "config.json: it is no object");
  folder.write("config.json", R"({"a":NaN,"b":-Infinity})");
  CHECK(nf4::Checkpoint(folder.path).config().has("a"));
  folder.write("config.json", "{}" + std::string(16'000'000, ' '));
  has(error(), "config.json: it is larger than 16000000 bytes");
  fs::remove(folder.path + "/model.safetensors");
  fs::create_directory(folder.path + "/model.safetensors");
  fs::remove(folder.path + "/config.json");
  has(error(), "it is not a regular file");
}

TEST_CASE("an index of another name, and by its path", "[checkpoint]") {
  const Folder folder;
  folder.write("a.safetensors", file_of({{"a", "U8", "1", "1"}}));
  folder.write("b.safetensors", file_of({{"b", "U8", "1", "1"}}));
  folder.write("x.safetensors.index.json", R"({"weight_map":{"b":"b.safetensors"}})");
  folder.write("config.json", R"({"c":1})");
  for (const std::string &path : {folder.path, folder.path + "/x.safetensors.index.json"}) {
    const nf4::Checkpoint checkpoint(path);
    CHECK((checkpoint.has("b") && !checkpoint.has("a") && checkpoint.config().size("c") == 1));
  }
}

TEST_CASE("files that are no regular ones, and folders that cannot be read", "[checkpoint]") {
  const Folder folder;
  const auto error = [&] { return error_of([&] { nf4::Checkpoint checkpoint(folder.path); }); };
  for (const char *name : {"model.safetensors.index.json", "model.safetensors", "config.json"}) {
    const std::string path = folder.path + "/" + name;
    for (const bool is_fifo : {true, false}) {
      if (is_fifo)
        REQUIRE(mkfifo(path.c_str(), 0600) == 0);
      else
        fs::create_symlink("/dev/zero", path);
      has(error(), std::string(name) + ": it is not a regular file");
      fs::remove(path);
    }
    if (path.find("index") == path.npos) folder.write(name, file_of("{}"));
  }
  fs::permissions(folder.path, fs::perms::none);
  if (access(folder.path.c_str(), R_OK) != 0) has(error(), "cannot be read: Permission denied");
  fs::permissions(folder.path, fs::perms::owner_all);
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
  has(refusal(file_of("not JSON")), "model.safetensors: not JSON at 'not JSON'");
  for (const char *header : {"[]", " {}"}) has(refusal(file_of(header)), "its header is no object");
  for (const char *metadata : {"1", "[]", R"("x")", R"({"a":1})"})
    has(refusal(file_of(R"({"__metadata__":)" + std::string(metadata) + "}")),
        "__metadata__ is no object of strings");
  CHECK(refusal(file_of(R"({"__metadata__":null})")).empty());
  const auto entry = [](const std::string &text) {
    return refusal(file_of("{\"a\":{" + text + "}}", "12345678"));
  };
  const std::string offsets = R"("data_offsets":[0,8])";
  has(entry(offsets + R"(,"shape":[8])"), "a: dtype is missing");
  has(entry(offsets + R"(,"dtype":"U8")"), "a: shape is no array");
  has(entry(R"("dtype":"U8","shape":[8])"), "a: data_offsets is no array");
  for (const std::string dtype : {"Q", "Q8", "-U16", "U16 ", " ", "", "U", "I32 U32", "F4_E2M1"})
    has(entry(offsets + R"(,"dtype":")" + dtype + R"(","shape":[8])"),
        "a: dtype is " + dtype + ", which safetensors has not");
  for (const char *dtype : {"F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "BOOL", "I8"})
    CHECK(entry(offsets + R"(,"dtype":")" + dtype + R"(","shape":[8])").empty());
  CHECK(entry(offsets + R"(,"dtype":"C64","shape":[1])").empty());
  // Of less than a byte: 16 of 4 bits; of 6 bits, as many as take whole bytes.
  CHECK(entry(offsets + R"(,"dtype":"F4","shape":[4,4])").empty());
  has(entry(offsets + R"(,"dtype":"F4","shape":[15])"), "a has 8 bytes for F4 of shape [15]");
  CHECK(refusal(file_of(R"({"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})", "123"))
            .empty());
  has(refusal(file_of(R"({"a":{"dtype":"F6_E3M2","shape":[5],"data_offsets":[0,4]}})", "1234")),
      "a has 4 bytes for F6_E3M2 of shape [5]");
  has(entry(offsets + R"(,"dtype":"F32","shape":[3])"), "a has 8 bytes for F32 of shape [3]");
  has(entry(offsets + R"(,"dtype":"U8","shape":[-8])"), "a: shape/0 is -8");
  has(entry(offsets + R"(,"dtype":"U8","shape":[8.0])"), "a: shape/0 is 8.0");
  has(entry(offsets + R"(,"dtype":"U8","shape":[9223372036854775807,2])"), "a has 8 bytes for U8");
  has(entry(offsets + R"(,"dtype":"U8","shape":[9223372036854775808])"), "a: shape/0 is 92233");
  // A size of 0 hides no overflow.
  has(refusal(file_of(R"({"a":{"dtype":"U8","shape":[9223372036854775807,2,0],)"
                      R"("data_offsets":[0,0]}})")),
      "a has 0 bytes for U8");
  std::string sizes = "1";
  for (int i = 0; i < 32; ++i) sizes += ",1";
  has(refusal(
          file_of(R"({"a":{"dtype":"U8","shape":[)" + sizes + R"(],"data_offsets":[0,1]}})", "1")),
      "a has 33 dimensions");
  const auto both = [](const std::string &a, const std::string &b, const std::string &data) {
    const auto each = [](const std::string &name, const std::string &offsets) {
      return "\"" + name + R"(":{"dtype":"U8","shape":[4],"data_offsets":[)" + offsets + "]}";
    };
    return refusal(file_of("{" + each("a", a) + "," + each("b", b) + "}", data));
  };
  CHECK(both("4,8", "0,4", "12345678").empty());
  has(both("0,4", "0,4", "12345678"), "b overlaps other data: it begins at 0; expected 4");
  has(both("0,4", "2,6", "12345678"), "b overlaps other data: it begins at 2; expected 4");
  has(both("0,4", "5,9", "123456789"), "b leaves a gap before it: it begins at 5; expected 4");
  has(both("1,5", "5,9", "123456789"), "a leaves a gap before it");
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
  for (const char *part : {"nested_absmax", "nested_quant_map"}) {
    std::vector<Tensor> more = flat();
    more.push_back({std::string("a.weight.") + part, "F32", "1", "1234"});
    has(read(more), std::string("is not nested, and there is a.weight.") + part);
  }
  const std::string codes(32, '\x70');
  CHECK(changed(flat(), 0, {"a.weight", "BF16", "16,1", codes}).empty());
  for (const char *shape : {"32", "1,32", "16,2", "32,1,1"})
    has(changed(flat(), 0, {"a.weight", "U8", shape, codes}), "expected a single column");
  has(changed(flat(), 0, {"a.weight", "I32", "8,1", codes}),
      "a.weight is I32; packed bytes are not stored as that");
  const std::string json = flat()[3].data;
  has(changed(flat(), 3, {flat()[3].name, "I8", std::to_string(json.size()), json}), "is I8 of ");
  has(changed(flat(), 3,
              {flat()[3].name, "U8", "65537", json + std::string(65537 - json.size(), ' ')}),
      "is U8 of 65537 bytes; expected U8, up to 65536");
  has(changed(flat(), 3, {flat()[3].name, "U8", "2", "[]"}), "bitsandbytes__nf4 is no object");
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
  has(state("256", "3"), "nested_blocksize is 3");
  has(state("\"nested_blocksize\":256,", ""), "nested_blocksize is missing");
  has(state("float32", "float16"), "nested_dtype is float16");
  has(state("0.5", "1e39"), "nested_offset is 1e+39");
  has(state("0.5", "NaN"), "not JSON at 'NaN");
}

// At any place in a file, packed bytes and absmax in 8 bits are not copied; what is copied is
// copied once.
TEST_CASE("where the parts of descriptors are", "[checkpoint]") {
  for (const size_t pad : {0, 1, 2, 3}) {
    const Folder folder;
    std::vector<Tensor> tensors = nested();
    for (const Tensor &each : gptq({}, "b")) tensors.push_back(each);
    folder.write("model.safetensors", file_of(tensors, pad));
    const nf4::Checkpoint checkpoint(folder.path);
    const auto at = [&](const char *name) -> const void * { return checkpoint.tensor(name).data; };
    const nf4_tensor weight = checkpoint.nf4_weight("a.weight");
    CHECK((weight.packed == at("a.weight") && weight.absmax == at("a.weight.absmax")));
    const auto aligned = [](const void *part, size_t to) {
      return reinterpret_cast<uintptr_t>(part) % to == 0;
    };
    CHECK((weight.nested_absmax == at("a.weight.nested_absmax")) ==
          aligned(at("a.weight.nested_absmax"), 4));
    CHECK((aligned(weight.nested_absmax, 4) && aligned(weight.nested_code, 4)));
    const nf4_tensor again = checkpoint.nf4_weight("a.weight");
    CHECK(std::memcmp(&weight, &again, sizeof weight) == 0);
    const nf4_int4_tensor integers = checkpoint.int4_weight("b.weight");
    CHECK((integers.scales == at("b.scales")) == aligned(at("b.scales"), 2));
    CHECK((aligned(integers.packed, 4) && aligned(integers.zeros, 4)));
    const nf4_int4_tensor same = checkpoint.int4_weight("b.weight");
    CHECK(std::memcmp(&integers, &same, sizeof same) == 0);
  }
}

TEST_CASE("files that are read into memory", "[checkpoint]") {
  const Folder folder;
  const auto write = [&](const char *data) {
    folder.write("model.safetensors", file_of({{"x", "U8", "4", data}}));
  };
  const auto bytes_in = [](const nf4::Checkpoint &checkpoint) {
    const nf4::StoredTensor &x = checkpoint.tensor("x", {4});
    return std::string(reinterpret_cast<const char *>(x.data), 4);
  };
  write("abcd");
  const nf4::Checkpoint mapped(folder.path);
  const nf4::Checkpoint read(folder.path, nf4::FileAccess::kRead);
  CHECK((bytes_in(mapped) == "abcd" && bytes_in(read) == "abcd"));
  write("efgh");
  CHECK((bytes_in(mapped) == "efgh" && bytes_in(read) == "abcd"));
  folder.write("model.safetensors", "");
  has(error_of([&] { nf4::Checkpoint empty(folder.path, nf4::FileAccess::kRead); }),
      "shorter than its header says");
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

TEST_CASE("parts in other memory, and products of both kinds", "[checkpoint]") {
  const Folder folder;
  std::vector<Tensor> tensors = nested();
  for (const Tensor &each : gptq({}, "b")) tensors.push_back(each);
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
    integers = nf4::copy_parts(checkpoint.int4_weight("b.weight"), copy);
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
