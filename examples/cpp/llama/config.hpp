// What config.json says of a model of LLaMA's shape. What is not computed here is refused by name.
#pragma once

#include <cmath>

#include "checkpoint.hpp"

struct Config {
  int64_t vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim, positions;
  float eps;
  bool tied, attention_bias, mlp_bias;
  std::string quantization;        // quant_method, or empty
  std::string checkpoint_format;   // of GPTQ
  std::vector<float> frequencies;  // of RoPE, by pair of columns of a head

  explicit Config(const Json &json) {
    require(
        json.get<std::string>("model_type") == "llama",
        "config.json: model_type is " + json.get<std::string>("model_type") + "; llama is read");
    const auto size = [&json](const char *key, double otherwise) {
      const double number = otherwise > 0 ? json.get_or(key, otherwise) : json.get<double>(key);
      require(number >= 1 && number < 1e9 && number == std::floor(number),
              std::string("config.json: ") + key + " is " + std::to_string(number));
      return static_cast<int64_t>(number);
    };
    vocabulary = size("vocab_size", 0);
    hidden = size("hidden_size", 0);
    intermediate = size("intermediate_size", 0);
    layers = size("num_hidden_layers", 0);
    heads = size("num_attention_heads", 0);
    kv_heads = size("num_key_value_heads", heads);
    head_dim = size("head_dim", std::max<double>(1, hidden / heads));
    positions = size("max_position_embeddings", 2048);
    require(heads % kv_heads == 0 && head_dim % 2 == 0,
            "config.json: num_attention_heads, num_key_value_heads or head_dim does not fit");
    eps = static_cast<float>(json.get_or("rms_norm_eps", 1e-6));
    tied = json.get_or("tie_word_embeddings", false);
    attention_bias = json.get_or("attention_bias", false);
    mlp_bias = json.get_or("mlp_bias", false);
    const std::string activation = json.get_or<std::string>("hidden_act", "silu");
    require(activation == "silu",
            "config.json: hidden_act is " + activation + "; silu is computed");
    if (const Json *quantized = json.find("quantization_config")) {
      quantization = quantized->get_or<std::string>("quant_method", "bitsandbytes");
      checkpoint_format = quantized->get_or<std::string>("checkpoint_format", "gptq");
    }
    set_frequencies(json);
  }

 private:
  // transformers 5 has rope_parameters; before, rope_theta stood beside rope_scaling.
  void set_frequencies(const Json &json) {
    const Json *rope = json.find("rope_parameters");
    const double theta = (rope ? *rope : json).get_or("rope_theta", json.get_or("rope_theta", 1e4));
    if (!rope) rope = json.find("rope_scaling");
    std::string type = "default";
    if (rope) type = rope->get_or("rope_type", rope->get_or("type", type));
    require(type == "default" || type == "llama3",
            "config.json: rope_type is " + type + "; default and llama3 are computed");
    for (int64_t pair = 0; pair < head_dim / 2; ++pair) {
      const double frequency = std::pow(theta, -2.0 * pair / head_dim);
      frequencies.push_back(
          static_cast<float>(type == "llama3" ? scaled(*rope, frequency) : frequency));
    }
  }
  // Llama 3.1: long wavelengths are stretched by `factor`, short ones are not, and those between
  // are interpolated.
  static double scaled(const Json &rope, double frequency) {
    const double low = rope.get<double>("low_freq_factor"),
                 high = rope.get<double>("high_freq_factor");
    const double turns =
        rope.get<double>("original_max_position_embeddings") * frequency / 6.283185307179586;
    const double kept = std::fmin(1, std::fmax(0, (turns - low) / (high - low)));
    return frequency * (kept + (1 - kept) / rope.get<double>("factor"));
  }
};
