// Reads the config.json of models of the LLaMA architecture, as transformers 4 and 5 write it.
// Header-only, C++17.
#ifndef NF4_LLAMA_CONFIG_HPP
#define NF4_LLAMA_CONFIG_HPP

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <nf4/json.hpp>
#include <string>
#include <vector>

namespace nf4 {
inline namespace NF4_INLINE_NAMESPACE {

// The shape of a model. Trivially copyable, so that a kernel can take it.
struct LlamaConfig {
  int vocabulary, layers, hidden, intermediate, heads, kv_heads;
  int head_dim;   // even
  int positions;  // the maximum length of a sequence
  float norm_eps;
  bool tied;  // the output head is the embedding
  bool attention_bias, mlp_bias;

  // Throws if a value is missing or not supported. Sizes are from 1 to 2^24 - 1; widths (hidden,
  // intermediate and heads * head_dim) are at most 2^20, so that an int counts the numbers of 1024
  // rows; head_dim is at most 4096. hidden, intermediate and head_dim must be multiples of
  // `multiple`, an even number, such as the count of numbers that a kernel loads together; heads
  // must be a multiple of kv_heads. The supported model_type is llama, the hidden_act silu, and the
  // rope_type default or llama3. Throws, too, for numbers from which RoPE or a norm cannot be
  // computed.
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
    const double eps = json.number("rms_norm_eps", 1e-6);
    require(eps >= 0 && eps <= FLT_MAX, json.name, ": rms_norm_eps is ", eps);
    norm_eps = static_cast<float>(eps);
    tied = json.flag("tie_word_embeddings", false);
    attention_bias = json.flag("attention_bias", false);
    mlp_bias = json.flag("mlp_bias", false);
    rope_frequencies(json);
  }

  // Returns the angles of RoPE from one position to the next, [head_dim / 2]; entry i is for
  // columns i and i + head_dim / 2 of a head. `json` must be the constructor's.
  std::vector<float> rope_frequencies(const Json &json) const {
    const std::string rope = rope_of(json);
    const auto positive = [&json](const std::string &key, std::optional<double> otherwise = {}) {
      const double found = json.number(key, otherwise);
      require(found > 0, json.name, ": ", key, " is ", found, "; expected more than 0");
      return found;
    };
    const bool is_llama3 = rope_type(json) == "llama3";
    const double theta =
        positive(json.has(rope + "rope_theta") ? rope + "rope_theta" : "rope_theta", 10000);
    // It may be beside the RoPE parameters or among them.
    for (const std::string &in : {std::string(), rope})
      require(json.number(in + "partial_rotary_factor", 1) == 1, json.name, ": ", in,
              "partial_rotary_factor is not 1");
    double low = 0, high = 1, before = 1, factor = 1;
    if (is_llama3) {
      low = positive(rope + "low_freq_factor");
      high = positive(rope + "high_freq_factor");
      before = positive(rope + "original_max_position_embeddings");
      factor = positive(rope + "factor");
      require(high > low, json.name, ": ", rope, "high_freq_factor is ", high,
              "; expected more than low_freq_factor, ", low);
    }
    std::vector<float> frequencies;
    for (int pair = 0; pair < head_dim / 2; ++pair) {
      double frequency = std::pow(theta, -2.0 * pair / head_dim);
      if (is_llama3) {
        // Long wavelengths are stretched, short ones are not, and those between are interpolated.
        const double turns = before * frequency / (2 * M_PI),
                     kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
        frequency *= kept + (1 - kept) / factor;
      }
      require(frequency <= FLT_MAX, json.name, ": a frequency of RoPE is ", frequency);
      frequencies.push_back(static_cast<float>(frequency));
    }
    return frequencies;
  }

 private:
  // transformers 5 writes rope_parameters. Earlier versions wrote rope_theta beside rope_scaling;
  // transformers 5 still takes rope_scaling first, unless it is empty.
  static std::string rope_of(const Json &json) {
    const Json *scaling = json.find("rope_scaling"), *parameters = json.find("rope_parameters");
    for (const Json *each : {scaling, parameters})
      require(!each || each->word == "{}", json.name, ": ", each ? each->name : "", " is ",
              each ? each->word : "", "; expected an object");
    return scaling && !scaling->members.empty() ? "rope_scaling/" : "rope_parameters/";
  }
  static std::string rope_type(const Json &json) {
    const std::string key = rope_of(json) + "rope_type";
    return json.choice(json.has(key) ? key : rope_of(json) + "type", {"default", "llama3"},
                       "default");
  }
};

}  // namespace NF4_INLINE_NAMESPACE
}  // namespace nf4

#endif
