// include/nf4/checkpoint.hpp and int4_config.hpp: integer weights, and what config.json says of
// them.
#include <nf4/checkpoint.hpp>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/checkpoint_files.hpp"
#include "support/error_of.hpp"

namespace {

// Whether all weights of a folder are `expected`; the error.
std::string read_folder(const Folder &folder, float expected, nf4_int4_layout layout) {
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
// The same of these tensors under a quantization_config.
std::string read_int4(const std::vector<Tensor> &tensors, const std::string &config = "",
                      float expected = 1, nf4_int4_layout layout = NF4_INT4_GPTQ, size_t pad = 0) {
  const Folder folder;
  folder.write("model.safetensors", file_of(tensors, pad));
  if (!config.empty()) folder.write("config.json", "{\"quantization_config\":" + config + "}");
  return read_folder(folder, expected, layout);
}

// A field of JSON in place of another.
std::string with(std::string json, const std::string &from, const std::string &to) {
  REQUIRE(json.find(from) != json.npos);
  return json.replace(json.find(from), from.size(), to);
}
const std::string kGptq = R"({"quant_method":"gptq","bits":4,"group_size":8})",
                  kAwq = R"({"quant_method":"awq","bits":4})",
                  kGroup = R"({"weights":{"num_bits":4,"group_size":8,"symmetric":true}})",
                  kCompressed = R"({"quant_method":"compressed-tensors","format":"pack-quantized",)"
                                R"("config_groups":{"group_0":)" +
                                kGroup + "}}";

}  // namespace

TEST_CASE("integers of checkpoints", "[checkpoint]") {
  const std::vector<int32_t> order{0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1},
      plain{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  CHECK(read_int4(gptq(), kGptq).empty());
  CHECK(read_int4(gptq()).empty());
  CHECK(read_int4(gptq(plain)).empty());
  CHECK(read_int4(gptq(order), kGptq).empty());
  for (const char *key : {"checkpoint_format", "format"})
    for (const char *version : {"gptq_v2", "GPTQ_V2"})
      CHECK(read_int4(gptq(),
                      with(kGptq, "{", std::string("{\"") + key + "\":\"" + version + "\","), 2)
                .empty());
  for (const size_t pad : {1, 2, 3}) {
    CHECK(read_int4(gptq(order), kGptq, 1, NF4_INT4_GPTQ, pad).empty());
    CHECK(read_int4(compressed(), kCompressed, 1, NF4_INT4_COMPRESSED_TENSORS, pad).empty());
  }
  CHECK(read_int4(compressed(), "", 1, NF4_INT4_COMPRESSED_TENSORS).empty());
  std::vector<Tensor> awq = gptq();
  awq[0].shape = "16,2";
  CHECK(read_int4(awq, kAwq, 2, NF4_INT4_AWQ).empty());
  CHECK(read_int4(awq, "", 2, NF4_INT4_AWQ).empty());

  has(read_int4(gptq(), kAwq), "the weight has the shape [128, 2]; expected [16, 16]");
  has(read_int4(compressed(), kGptq), "a.weight_packed: the weight is not of gptq");
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

TEST_CASE("quantization_config", "[checkpoint]") {
  const auto gptq_with = [](const std::string &more) {
    return read_int4(gptq(), kGptq.substr(0, kGptq.size() - 1) + "," + more + "}");
  };
  has(read_int4(gptq(), R"("gptq")"), "config.json: quantization_config is no object");
  has(read_int4(gptq(), R"({"bits":4})"), "quantization_config: quant_method is missing");
  has(read_int4(gptq(), R"({"quant_method":"hqq"})"), "quant_method is hqq; expected: gptq, awq");
  has(read_int4(gptq(), R"({"quant_method":"gptq"})"), "quantization_config: bits is missing");
  for (const std::string bits : {"8", "3", "true", "4.0", "\"4\""})
    has(read_int4(gptq(), with(kGptq, "\"bits\":4", "\"bits\":" + bits)), "bits is " + bits);
  has(read_int4(gptq(), with(kGptq, ":8", ":16")), "has groups of 8 columns; quantization_config");
  has(read_int4(gptq(), with(kGptq, ":8", ":-1")), "quantization_config says [-1]");
  has(read_int4(gptq(), with(kGptq, ":8", ":0")), "group_size is 0; expected");
  has(read_int4(gptq(), with(kGptq, ":8", ":-2")), "group_size is -2");
  CHECK(read_int4(gptq(), with(kGptq, ":8", ":null")).empty());
  has(gptq_with(R"("pack_dtype":"int8")"), "pack_dtype is int8; expected: int32");
  CHECK(gptq_with(R"("pack_dtype":"int32","is_marlin_format":false,"sym":true)").empty());
  has(gptq_with(R"("is_marlin_format":true)"), "is_marlin_format is true");
  has(gptq_with(R"("checkpoint_format":"marlin")"),
      "checkpoint_format is marlin; expected: gptq, gptq_v2");
  CHECK(gptq_with(R"("checkpoint_format":"GPTQ")").empty());
  has(gptq_with(R"("sym":1)"), "sym is 1");
  // Zero points of 9, or of v1 under the name of v2.
  has(read_int4(gptq(), with(kGptq, "{", R"({"sym":true,"checkpoint_format":"GPTQ_V2",)"), 2),
      "a.qzeros: zero points are not 8, and quantization_config says symmetric; or");
  // Other modules have other sizes, and weights that are not symmetric.
  const std::string dynamic =
      R"("sym":true,"dynamic":{"b":{"group_size":16,"sym":false},"-:c":{}})";
  CHECK(gptq_with(dynamic).empty());
  CHECK(
      read_int4(gptq(), with("{" + dynamic + R"(,"quant_method":"gptq","bits":4,"group_size":16})",
                             "\"group_size\":16,\"sym", "\"group_size\":8,\"sym"))
          .empty());
  has(gptq_with(R"("dynamic":{"b/c":{"bits":8}})"), "dynamic b/c: bits is 8");
  has(gptq_with(R"("dynamic":[])"), "dynamic is no object");

  std::vector<Tensor> awq = gptq();
  awq[0].shape = "16,2";
  for (const char *version : {"gemm", "GEMM", ""})
    CHECK(read_int4(awq, with(kAwq, "{", std::string(R"({"version":")") + version + "\","), 2,
                    NF4_INT4_AWQ)
              .empty());
  has(read_int4(awq, with(kAwq, "{", R"({"version":"gemv",)")), "version is gemv; expected: gemm");
  has(read_int4(awq, with(kAwq, "4", "8")), "bits is 8; weights of 4 bits are read");
  const std::string symmetric = with(kAwq, "{", R"({"zero_point":false,)");
  has(read_int4(awq, symmetric, 2, NF4_INT4_AWQ), "a.qzeros: zero points are not 8");
  awq[1].data = std::string(16, '\x88');
  CHECK(read_int4(awq, symmetric, 1, NF4_INT4_AWQ).empty());
  awq[1] = {"b", "U8", "1", "x"};
  CHECK(read_int4(awq, symmetric, 1, NF4_INT4_AWQ).empty());
  has(read_int4(awq, kAwq, 1, NF4_INT4_AWQ), "has no tensor a.qzeros");

  const nf4_int4_layout layout = NF4_INT4_COMPRESSED_TENSORS;
  const auto compressed_with = [&](const std::string &from, const std::string &to) {
    return read_int4(compressed(), with(kCompressed, from, to), 1, layout);
  };
  CHECK(compressed_with("8", "8").empty());
  CHECK(compressed_with("\"symmetric\":true", "\"strategy\":\"group\"").empty());
  has(compressed_with("symmetric\":true", "symmetric\":false"),
      "has no tensor a.weight_zero_point");
  has(compressed_with("pack-quantized", "marlin-24"), "format is marlin-24; expected: pack");
  has(compressed_with("\"num_bits\":4", "\"num_bits\":8"), "num_bits is 8; weights of 4 bits");
  has(compressed_with("\"group_size\":8", "\"group_size\":16"), "has groups of 8 columns");
  has(compressed_with("\"group_size\":8,", ""), "strategy is group, and group_size 0");
  has(compressed_with("\"group_size\":8", "\"strategy\":\"channel\""), "config says [-1]");
  has(compressed_with("\"num_bits\"", "\"type\":\"float\",\"num_bits\""), "type is float");
  has(compressed_with("\"num_bits\"", "\"type\":null,\"num_bits\""), "type is null");
  CHECK(compressed_with("symmetric\":true", "symmetric\":null").empty());
  has(compressed_with("{\"weights\"", "{\"input_activations\":{\"a\":1},\"weights\""),
      "quantized activations are not read");
  has(compressed_with("{\"quant", "{\"sparsity_config\":{\"a\":1},\"quant"),
      "sparsity_config/format is missing");
  has(compressed_with("{\"quant", "{\"sparsity_config\":{\"format\":\"sparse-bitmask\"},\"quant"),
      "sparsity_config/format is sparse-bitmask; expected: dense");
  CHECK(compressed_with("{\"quant", "{\"sparsity_config\":{\"format\":\"dense\"},\"quant").empty());
  has(compressed_with("{\"group_0\":" + kGroup + "}", "{}"), "config_groups is empty");
  has(compressed_with("config_groups", "groups"), "config_groups is empty");
  std::vector<Tensor> tensors = compressed();
  tensors.push_back({"a.weight_zero_point", "I32", "2,2", std::string(16, '\x77')});
  CHECK(read_int4(tensors, with(kCompressed, "true", "false"), 2, layout).empty());
  CHECK(read_int4(tensors, with(kCompressed, "true", "null"), 2, layout).empty());
  CHECK(read_int4(tensors, "", 2, layout).empty());
  has(read_int4(tensors, kCompressed, 2, layout), "has zero points, and quantization_config says");
  tensors = compressed();
  tensors.push_back({"a.weight_g_idx", "I32", "16",
                     bytes_of<int32_t>({0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1})});
  CHECK(read_int4(tensors, kCompressed, 1, layout).empty());
  tensors[0] = {"a.weight_shape", "I32", "2", bytes_of<int32_t>({16, 16})};
  CHECK(read_int4(tensors, kCompressed, 1, layout).empty());
  tensors[0].dtype = "F32";
  has(read_int4(tensors, kCompressed, 1, layout), "a.weight_shape is F32; I64 and I32 are read");
}

TEST_CASE("names of integers", "[checkpoint]") {
  const Folder folder;
  folder.write("model.safetensors", file_of(gptq()));
  const nf4::Checkpoint checkpoint(folder.path);
  CHECK(checkpoint.is_int4("a.weight"));
  for (const char *name : {"a.bias", "a.scales", "a.qweight", "a", ".weight", "weight", ""})
    CHECK(!checkpoint.is_int4(name));
  has(error_of([&] { checkpoint.int4_weight("a.bias"); }), "a.bias does not end with .weight");
  std::vector<Tensor> both = gptq();
  both.push_back({"a.weight", "F32", "1", "1234"});
  has(read_int4(both), "the weight is there as a dense one, too");
}

TEST_CASE("where a folder says how it is quantized", "[checkpoint]") {
  const std::string v2 = with(kGptq, "{", R"({"checkpoint_format":"gptq_v2",)"),
                    unnamed = with(v2, R"("quant_method":"gptq",)", "");
  const auto read = [](const std::string &config, const std::string &file = "",
                       const std::string &beside = "") {
    const Folder folder;
    folder.write("model.safetensors", file_of(gptq()));
    folder.write("config.json", config);
    if (!file.empty()) folder.write(file, beside);
    return read_folder(folder, 2, NF4_INT4_GPTQ);
  };
  const auto of = [](const std::string &key, const std::string &value) {
    return "{\"" + key + "\":" + value + "}";
  };
  for (const char *key : {"quantization_config", "compression_config"})
    for (const std::string &place : {of(key, v2), of("text_config", of(key, v2)),
                                     of("thinker_config", of("text_config", of(key, v2)))}) {
      CHECK(read(place).empty());
      CHECK(read(place, "quantize_config.json", unnamed).empty());
      has(read(place, "quantize_config.json", kGptq),
          "quantize_config.json: its checkpoint_format");
      has(read(place, "quant_config.json", with(v2, ":8", ":16")), "its group_size is not that of");
      has(read(place, "quant_config.json", kAwq), "its quant_method is not that of");
    }
  for (const char *file :
       {"quantize_config.json", "quant_config.json", "quantization_config.json"}) {
    CHECK(read("{}", file, unnamed).empty());
    CHECK(read(of("quantization_config", "null"), file, v2).empty());
    has(read("{}", file, "[]"), "it is no object");
  }
  const std::string of_modelopt =
      R"({"producer":{"name":"modelopt"},"quantization":{"quant_algo":"W4A16"}})";
  has(read("{}", "hf_quant_config.json", of_modelopt),
      "hf_quant_config.json: quant_method is missing");
  has(read(of("quantization_config", v2), "hf_quant_config.json", of_modelopt),
      "hf_quant_config.json: quant_method is missing");
  CHECK(read(of("quantization_config", v2), "hf_quant_config.json", "{}").empty());
  CHECK(read(of("quantization_config", v2), "quantize_config.json", "{}").empty());
  has(read(of("quantization_config", v2), "quantize_config.json", with(unnamed, "4", "8")),
      "bits is 8");
  has(read(of("quantization_config", with(v2, "{", R"({"format":"gptq",)"))),
      "format is gptq, but checkpoint_format is gptq_v2");
  has(read(of("quantization_config", R"({"quant_method":"auto-round","bits":4})")),
      "quant_method is auto-round; expected: gptq, awq, compressed-tensors");
}
