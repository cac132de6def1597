// What config.json says of a model of LLaMA's shape. What is not computed here is refused by name.
#pragma once

#include <algorithm>
#include <cmath>

#include "checkpoint.hpp"

struct Config {
  int64_t vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim, positions;
  float eps;
  bool tied, attention_bias, mlp_bias, is_awq, is_gptq_v2;
  std::vector<float> frequencies;  // of RoPE, for each pair of columns of a head

  explicit Config(const Json &json) {
    only(json, "model_type", {"llama"});
    only(json, "hidden_act", {"silu"});
    // transformers 5 has rope_parameters; before, rope_theta stood beside rope_scaling.
    const bool together =
        json.has("rope_parameters/rope_theta") || json.has("rope_parameters/rope_type");
    const std::string rope = together ? "rope_parameters/" : "rope_scaling/";
    only(json, rope + "rope_type", {"default", "llama3"});
    only(json, rope + "type", {"default", "llama3"});
    const auto size = [&json](const char *key, int64_t otherwise) {
      const int64_t size = otherwise && !json.has(key) ? otherwise : json.size(key);
      require(0 < size && size < 1 << 30, "config.json: ", key, " is ", size);
      return size;
    };
    vocabulary = size("vocab_size", 0);
    hidden = size("hidden_size", 0);
    intermediate = size("intermediate_size", 0);
    layers = size("num_hidden_layers", 0);
    heads = size("num_attention_heads", 0);
    kv_heads = size("num_key_value_heads", heads);
    head_dim = size("head_dim", hidden / heads);
    positions = size("max_position_embeddings", 2048);
    require(heads % kv_heads == 0 && head_dim % 2 == 0,
            "config.json: num_attention_heads or head_dim does not fit");
    eps = static_cast<float>(json.number("rms_norm_eps", 1e-6));
    const auto is = [&json](const std::string &key, const char *text) {
      return json.has(key) && json.text(key) == text;
    };
    tied = is("tie_word_embeddings", "true");
    attention_bias = is("attention_bias", "true");
    mlp_bias = is("mlp_bias", "true");
    is_awq = is("quantization_config/quant_method", "awq");
    is_gptq_v2 = is("quantization_config/checkpoint_format", "gptq_v2");
    const bool is_llama3 = is(rope + "rope_type", "llama3") || is(rope + "type", "llama3");
    const double theta = json.number(rope + "rope_theta", json.number("rope_theta", 1e4));
    for (int64_t pair = 0; pair < head_dim / 2; ++pair) {
      const double frequency = std::pow(theta, -2.0 * pair / head_dim);
      frequencies.push_back(
          static_cast<float>(is_llama3 ? llama3(json, rope, frequency) : frequency));
    }
  }

 private:
  static void only(const Json &json, const std::string &key,
                   const std::set<std::string> &computed) {
    std::string all;
    for (const std::string &each : computed) all += " " + each;
    require(!json.has(key) || computed.count(json.text(key)), "config.json: ", key, " is ",
            json.has(key) ? json.text(key) : "", "; what is computed:", all);
  }
  // Long wavelengths are stretched by `factor`, short ones are not, those between are interpolated.
  static double llama3(const Json &json, const std::string &rope, double frequency) {
    const double low = json.number(rope + "low_freq_factor"),
                 high = json.number(rope + "high_freq_factor");
    const double turns =
        json.number(rope + "original_max_position_embeddings") * frequency / (2 * M_PI);
    const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    return frequency * (kept + (1 - kept) / json.number(rope + "factor"));
  }
};
