// include/nf4/linears.hpp and llama_config.hpp.
#include <cmath>
#include <cstring>
#include <list>
#include <nf4/linears.hpp>
#include <nf4/llama_config.hpp>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/error_of.hpp"

namespace {

// The config of a small model; `more` goes before.
nf4::Json config(const std::string &more = "") {
  std::string text = "{" + more;
  for (const char *field : {"\"vocab_size\":10", "\"hidden_size\":64", "\"intermediate_size\":96",
                            "\"num_hidden_layers\":2", "\"num_attention_heads\":4"})
    if (const std::string each = field; more.find(each.substr(0, each.find(':'))) == more.npos)
      text += (text == "{" ? "" : ",") + each;
  return {"config.json", text + "}"};
}
std::string refusal(const std::string &more, int multiple = 16) {
  return error_of([&] { nf4::LlamaConfig shape(config(more), multiple); });
}

// Numbers of 16 bits, whose 1 is `Bits`.
template <uint16_t Bits>
struct Two {
  uint16_t bits;
  explicit Two(float value) : bits(value == 1 ? Bits : 0) {}
};

}  // namespace

TEST_CASE("dtypes of engines", "[checkpoint]") {
  CHECK(nf4::dtype_of<float>() == NF4_DTYPE_FP32);
  CHECK(nf4::dtype_of<Two<0x3c00>>() == NF4_DTYPE_FP16);
  CHECK(nf4::dtype_of<Two<0x3f80>>() == NF4_DTYPE_BF16);
  for (const std::string &error :
       {error_of([] { nf4::dtype_of<int32_t>(); }), error_of([] { nf4::dtype_of<int16_t>(); })})
    CHECK(error == "numbers of an engine are none of fp32, fp16 and bf16");
  CHECK(!std::is_constructible<nf4::Loader<float>, nf4::Checkpoint, bool,
                               nf4::Loader<float>::Copy>::value);
}

TEST_CASE("the shape of a LLaMA", "[checkpoint]") {
  const nf4::LlamaConfig shape(config(), 16);
  CHECK((shape.vocabulary == 10 && shape.layers == 2 && shape.hidden == 64));
  CHECK((shape.intermediate == 96 && shape.heads == 4 && shape.kv_heads == 4));
  CHECK((shape.head_dim == 16 && shape.positions == 2048 && shape.norm_eps == 1e-6f));
  CHECK((!shape.tied && !shape.attention_bias && !shape.mlp_bias));
  const nf4::LlamaConfig other(config(
      R"("num_key_value_heads":2,"head_dim":32,"tie_word_embeddings":true,"attention_bias":true)"));
  CHECK((other.kv_heads == 2 && other.head_dim == 32 && other.tied && other.attention_bias));

  CHECK(refusal(R"("model_type":"mistral")") ==
        "config.json: model_type is mistral; expected: llama");
  CHECK(refusal(R"("hidden_act":"gelu")") == "config.json: hidden_act is gelu; expected: silu");
  CHECK(refusal(R"("rope_scaling":{"type":"yarn"})") ==
        "config.json: rope_scaling/type is yarn; expected: default, llama3");
  CHECK(refusal(R"("vocab_size":null)") == "config.json: vocab_size is missing");
  CHECK(refusal(R"("hidden_size":72)") ==
        "config.json: hidden_size is 72; expected a multiple of 16");
  CHECK(refusal(R"("hidden_size":72,"head_dim":16)", 8).empty());
  CHECK(refusal(R"("num_hidden_layers":0)") ==
        "config.json: num_hidden_layers is 0; expected a multiple of 1");
  CHECK(refusal(R"("num_key_value_heads":3)") ==
        "config.json: num_attention_heads is 4; expected a multiple of 3");
  CHECK(refusal(R"("vocab_size":16777216)") == "config.json: vocab_size is 16777216");
  for (const char *eps : {"-1e-6", "1e39"})
    has(refusal(std::string("\"rms_norm_eps\":") + eps), "config.json: rms_norm_eps is ");
  CHECK(refusal(R"("rms_norm_eps":0)").empty());
  const std::string large =
      "config.json: hidden_size, intermediate_size, head_dim or "
      "num_attention_heads * head_dim is too large";
  CHECK(refusal(R"("head_dim":4112)") == large);
  CHECK(refusal(R"("num_attention_heads":16777215,"head_dim":4096)") == large);
  CHECK(refusal(R"("intermediate_size":1048592)") == large);
}

TEST_CASE("the frequencies of RoPE", "[checkpoint]") {
  const auto frequencies = [](const std::string &more) {
    const nf4::Json json = config(more);
    return nf4::LlamaConfig(json).rope_frequencies(json);
  };
  const std::vector<float> plain = frequencies("");
  REQUIRE(plain.size() == 8);
  CHECK((plain[0] == 1 && plain[4] == Approx(0.01)));
  CHECK(frequencies(R"("rope_theta":10000.0,"rope_scaling":null)") == plain);
  CHECK(frequencies(R"("rope_parameters":{"rope_theta":1e4,"rope_type":"default"})") == plain);
  CHECK(frequencies(R"("rope_theta":16)")[4] == 0.25f);
  const std::string llama3 = R"({"rope_type":"llama3","factor":8,"low_freq_factor":1,)"
                             R"("high_freq_factor":4,"original_max_position_embeddings":64})";
  const std::vector<float> stretched = frequencies("\"rope_scaling\":" + llama3);
  CHECK((stretched[0] == plain[0] && stretched[7] == Approx(plain[7] / 8)));
  // 64 positions of 0.316 are 3.22 turns: 0.74 of the way from 1 to 4.
  const double kept = (64 * std::pow(10, -0.5) / (2 * M_PI) - 1) / 3;
  CHECK(stretched[1] == Approx(plain[1] * (kept + (1 - kept) / 8)));
  CHECK(frequencies("\"rope_parameters\":" + llama3) == stretched);
  // rope_scaling first, as transformers takes it, unless it is empty.
  const std::string other = R"("rope_parameters":{"rope_type":"default","rope_theta":16})";
  CHECK(frequencies("\"rope_scaling\":" + llama3 + "," + other) == stretched);
  for (const char *empty : {"{}", "null"})
    CHECK(frequencies(R"("rope_scaling":)" + std::string(empty) + "," + other)[4] == 0.25f);
  has(refusal(R"("rope_scaling":{"type":"yarn"},"rope_parameters":{"rope_type":"default"})"),
      "rope_scaling/type is yarn");
  has(refusal(R"("rope_scaling":"yarn")"), "rope_scaling is \"yarn\"; expected an object");
  for (const char *theta : {"0", "-1"})
    has(refusal(std::string("\"rope_theta\":") + theta),
        "rope_theta is " + std::string(theta) + "; expected more than 0");
  has(refusal(R"("rope_theta":1e-300)"), "a frequency of RoPE is ");
  has(refusal(R"("partial_rotary_factor":0.5)"), "partial_rotary_factor is not 1");
  const auto without = [&](const std::string &from, const std::string &to) {
    std::string changed = llama3;
    return refusal("\"rope_scaling\":" + changed.replace(changed.find(from), from.size(), to));
  };
  has(without("\"factor\":8", "\"factor\":0"), "rope_scaling/factor is 0; expected more than 0");
  has(without("\"factor\":8", "\"factor\":-8"), "rope_scaling/factor is -8");
  has(without("\"high_freq_factor\":4", "\"high_freq_factor\":1"),
      "rope_scaling/high_freq_factor is 1; expected more than low_freq_factor, 1");
  has(without(":64", ":0"), "original_max_position_embeddings is 0");
  CHECK(error_of([&] { frequencies(R"("rope_scaling":{"type":"llama3"})"); }) ==
        "config.json: rope_scaling/low_freq_factor is missing");
}

TEST_CASE("layers of a checkpoint", "[checkpoint]") {
  const std::string folder = NF4_TEST_LLAMA;
  const nf4::Checkpoint checkpoint(folder);
  const nf4::LlamaConfig shape(checkpoint.config());
  const int64_t hidden = shape.hidden, inner = shape.intermediate;
  std::vector<float> x(hidden), y(2 * (2 * inner)), placed(y.size());
  for (int64_t i = 0; i < hidden; ++i) x[i] = float(i % 7) - 3;
  std::list<std::string> copies;
  const auto copy = [&](const void *data, size_t bytes, const std::string &) -> void * {
    return copies.emplace_back(static_cast<const char *>(data), bytes).data();
  };
  const auto run = [&](bool in_place, std::vector<float> &to) {
    nf4::Loader<float> load(checkpoint, in_place, copy);
    nf4::Linears<float> layers =
        load.linears("model.layers.0.mlp.", {{"gate_proj", inner}, {"up_proj", inner}}, false,
                     x.data(), hidden, to.data());
    layers.set_rows(1);
    layers.products.cpu(1);
    CHECK(layers.dense.empty());
  };
  run(true, y);
  CHECK(copies.empty());
  run(false, placed);
  CHECK((!copies.empty() && y == placed));
  // The result of a product with the dequantized weight.
  const nf4_tensor up = checkpoint.nf4_weight("model.layers.0.mlp.up_proj.weight");
  const std::string up_name = "model.layers.0.mlp.up_proj.weight";
  CHECK(up.packed == checkpoint.tensor(up_name).data);
  CHECK(up.absmax == checkpoint.tensor(up_name + ".absmax").data);
  std::vector<float> weight(inner * hidden);
  nf4::check(nf4_dequant_cpu(&up, weight.data(), NF4_DTYPE_FP32, 1));
  double sum = 0;
  for (int64_t k = 0; k < hidden; ++k) sum += weight[hidden + k] * x[k];
  CHECK(y[inner + 1] == Approx(sum).epsilon(1e-4));

  nf4::Loader<float> load(checkpoint, true, copy);
  copies.clear();
  const float *norm = load.dense("model.norm.weight", {hidden});
  CHECK((norm == load.dense("model.norm.weight", {hidden}) && copies.size() == 1));
  CHECK(error_of([&] { load.dense("model.norm.weight", {hidden + 1}); }) ==
        folder + "/model.safetensors: model.norm.weight has the shape [64]; expected [65]");
  // Without y, of which there is none before a step.
  const nf4::Linears<float> two = load.linears(
      "", {{"model.embed_tokens", shape.vocabulary}, {"model.embed_tokens", shape.vocabulary}},
      false, x.data(), hidden, nullptr);
  CHECK((two.dense[0].args.y == nullptr && two.dense[1].args.y == nullptr));
  const nf4::Linears<float> head = load.linears("", {{"model.embed_tokens", shape.vocabulary}},
                                                false, x.data(), hidden, nullptr);
  CHECK((head.dense.size() == 1 && head.dense[0].rows == shape.vocabulary));
  const std::string missing =
      error_of([&] { load.linears("model.", {{"norm", hidden}}, true, nullptr, hidden, nullptr); });
  CHECK(missing == folder + " has no tensor model.norm.bias");
}

TEST_CASE("the way that products go", "[checkpoint]") {
  nf4_tensor nf4{};
  nf4.struct_size = sizeof nf4;
  nf4.format = NF4_FORMAT_NF4;
  nf4.blocksize = 64;
  nf4.rows = 96;
  nf4.cols = 64;
  nf4_int4_tensor int4{};
  int4.struct_size = sizeof int4;
  int4.layout = NF4_INT4_GPTQ;
  int4.scales_dtype = NF4_DTYPE_FP16;
  int4.group_size = 64;
  int4.rows = 32;
  int4.cols = 64;
  nf4_matmul_args args{sizeof args, NF4_DTYPE_FP32, 0,       1,   nullptr,
                       64,          nullptr,        nullptr, 128, nullptr};
  nf4::Products products;
  for (const int32_t device : {NF4_DEVICE_CPU, 0}) CHECK(!products.prefer_dense(device));
  products.add(int4, args);
  products.add(nf4, args);
  products.set_rows(17);
  std::vector<int64_t> rows;
  products.visit([&](const auto &weight, const nf4_matmul_args &its) {
    CHECK((its.m == 17 && its.y_stride == 128 && weight.cols == its.x_stride));
    rows.push_back(weight.rows);
  });
  CHECK(rows == std::vector<int64_t>{96, 32});
  CHECK(!products.prefer_dense(NF4_DEVICE_CPU));
  CHECK(
      error_of([&] { products.prefer_dense(-2); }) ==
      "NF4_STATUS_INVALID_ARGUMENT: device is -2; expected a GPU's index, or NF4_DEVICE_CPU (-1)");
  // A GPU multiplies neither integers nor more than 16 rows of NF4 in fp32.
  bool of_17 = false, of_16 = true;
  const std::string error = error_of([&] {
    of_17 = products.prefer_dense(0);
    products.set_rows(16);
    of_16 = products.prefer_dense(0);
  });
  nf4_device gpu{};
  gpu.struct_size = sizeof gpu;
  if (nf4_device_info(0, &gpu) == NF4_STATUS_OK)
    CHECK((error.empty() && of_17 && (!of_16 || !gpu.timed)));
  else
    has(error, nf4_last_error());
}
