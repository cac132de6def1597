// config.json of models of LLaMA's shape, as transformers 4 and 5 write it. A header alone, in
// C++17.
#ifndef NF4_LLAMA_CONFIG_HPP
#define NF4_LLAMA_CONFIG_HPP

#include <algorithm>
#include <cmath>
#include <nf4/json.hpp>
#include <string>
#include <vector>

namespace nf4 {

// The shape of a model. Trivially copyable, so that a kernel can take it.
struct LlamaConfig {
  int vocabulary, layers, hidden, intermediate, heads, kv_heads;
  int head_dim;   // even
  int positions;  // the most that a sequence has
  float norm_eps;
  bool tied;  // the head is the embedding
  bool attention_bias, mlp_bias;

  // Throws for what is missing or is no size that an engine has: from 1 to 2^24 - 1; widths
  // (hidden, intermediate and heads * head_dim) up to 2^20, so that an int counts the numbers of
  // 1024 rows; head_dim up to 4096. hidden, intermediate and head_dim are multiples of `multiple`,
  // an even number, as of a kernel that loads so many numbers together, and heads those of
  // kv_heads. Throws for another model_type, hidden_act or rope_type than what is computed: llama;
  // silu; default and llama3.
  explicit LlamaConfig(const Json &json, int multiple = 2) {
    json.choice("model_type", {"llama"}, "llama");
    json.choice("hidden_act", {"silu"}, "silu");
    const auto size = [&json](const char *key, int of, std::optional<int64_t> otherwise) {
      const int64_t found = json.size(key, otherwise, (1 << 24) - 1);
      require(found > 0 && found % of == 0, json.name, ": ", key, " is ", found,
              "; expected a multiple of ", of);
      return static_cast<int>(found);
    };
    vocabulary = size("vocab_size", 1, {});
    layers = size("num_hidden_layers", 1, {});
    hidden = size("hidden_size", multiple, {});
    intermediate = size("intermediate_size", multiple, {});
    kv_heads = size("num_key_value_heads", 1, json.size("num_attention_heads"));
    heads = size("num_attention_heads", kv_heads, {});
    head_dim = size("head_dim", multiple, hidden / heads);
    positions = size("max_position_embeddings", 1, 2048);
    require(head_dim <= 4096 && int64_t{heads} * head_dim <= 1 << 20 &&
                std::max(hidden, intermediate) <= 1 << 20,
            json.name, ": hidden_size, intermediate_size, head_dim or ",
            "num_attention_heads * head_dim is too large");
    norm_eps = static_cast<float>(json.number("rms_norm_eps", 1e-6));
    tied = json.flag("tie_word_embeddings", false);
    attention_bias = json.flag("attention_bias", false);
    mlp_bias = json.flag("mlp_bias", false);
    rope_type(json);
  }

  // Of RoPE, the angle from one position to the next, [head_dim / 2]: for column i of a head and
  // column i + head_dim / 2. `json` is the same.
  std::vector<float> rope_frequencies(const Json &json) const {
    const std::string rope = rope_of(json);
    const bool is_llama3 = rope_type(json) == "llama3";
    const double theta = json.number(rope + "rope_theta", json.number("rope_theta", 10000));
    std::vector<float> frequencies;
    for (int pair = 0; pair < head_dim / 2; ++pair) {
      double frequency = std::pow(theta, -2.0 * pair / head_dim);
      if (is_llama3) {
        // Long wavelengths are stretched, short ones are not, those between are interpolated.
        const double low = json.number(rope + "low_freq_factor"),
                     high = json.number(rope + "high_freq_factor"),
                     before = json.number(rope + "original_max_position_embeddings"),
                     turns = before * frequency / (2 * M_PI),
                     kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
        frequency *= kept + (1 - kept) / json.number(rope + "factor");
      }
      frequencies.push_back(static_cast<float>(frequency));
    }
    return frequencies;
  }

 private:
  // transformers 5 has rope_parameters; before, rope_theta stood beside rope_scaling.
  static std::string rope_of(const Json &json) {
    return json.has("rope_parameters") ? "rope_parameters/" : "rope_scaling/";
  }
  static std::string rope_type(const Json &json) {
    const std::string key = rope_of(json) + "rope_type";
    return json.choice(json.has(key) ? key : rope_of(json) + "type", {"default", "llama3"},
                       "default");
  }
};

}  // namespace nf4

#endif
