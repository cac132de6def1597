// Reads the quantization_config of GPTQ, AWQ and compressed-tensors, which describes integer
// weights in config.json and in the files beside it. checkpoint.hpp uses it. Header-only, C++17.
// ERRORS are as in json.hpp.
#ifndef NF4_INT4_CONFIG_HPP
#define NF4_INT4_CONFIG_HPP

#include <cctype>
#include <nf4/json.hpp>

namespace nf4 {
inline namespace NF4_INLINE_NAMESPACE {

struct Int4Config {
  nf4_int4_layout layout;
  bool is_gptq_v2 = false;
  // The group sizes that weights may have, the usual one first; -1 means the whole row. Empty if
  // the config does not say.
  std::vector<int64_t> group_sizes;
  // Whether all zero points are 8. Empty if the config does not say, or if it depends on the
  // weight.
  std::optional<bool> symmetric;

  // Throws for everything that is not supported: widths other than 4 bits, other formats, and
  // values of another type.
  explicit Int4Config(const Json &json) : layout(layout_of(json)) {
    if (layout == NF4_INT4_GPTQ) gptq(json);
    if (layout == NF4_INT4_AWQ) awq(json);
    if (layout == NF4_INT4_COMPRESSED_TENSORS) compressed(json);
  }
  // Reads all `places` that describe the quantization; throws if two of them disagree.
  explicit Int4Config(const std::vector<Json> &places) : Int4Config(places.at(0)) {
    for (size_t i = 1; i < places.size(); ++i) {
      const Int4Config other(places[i]);
      const auto agree = [&](bool good, const char *key) {
        require(good, places[i].name, ": its ", key, " is not that of ", places[0].name);
      };
      agree(layout == other.layout, "quant_method");
      agree(is_gptq_v2 == other.is_gptq_v2, "checkpoint_format");
      agree(group_sizes.empty() || other.group_sizes.empty() || group_sizes == other.group_sizes,
            "group_size");
      agree(!symmetric || !other.symmetric || symmetric == other.symmetric, "symmetry");
      if (group_sizes.empty()) group_sizes = other.group_sizes;
      if (!symmetric) symmetric = other.symmetric;
    }
  }
  // Adds the descriptions in a config.json, at its top level and in the configs of a model's parts,
  // such as text_config. A null or empty description is ignored.
  static void add_places(const Json &config, std::vector<Json> &places) {
    for (Json each : config.members) {
      const bool is_empty = each.word == "null" || (each.word == "{}" && each.members.empty());
      const bool is_place = each.name == "quantization_config" || each.name == "compression_config";
      each.name = config.name + ": " + each.name;
      if (is_place && !is_empty) places.push_back(each);
      if (!is_place) add_places(each, places);
    }
  }

 private:
  using Flag = std::optional<bool>;

  static nf4_int4_layout layout_of(const Json &json) {
    require(json.word == "{}", json.name, " is no object");
    // Older configs, and those in files of their own, may lack the method.
    std::optional<std::string> method;
    for (const char *key : {"checkpoint_format", "desc_act", "sym"})
      if (json.has(key)) method = "gptq";
    for (const char *key : {"version", "zero_point"})
      if (json.has(key)) method = "awq";
    if (json.has("config_groups")) method = "compressed-tensors";
    method = json.choice("quant_method", {"gptq", "awq", "compressed-tensors"}, method);
    return method == "gptq"  ? NF4_INT4_GPTQ
           : method == "awq" ? NF4_INT4_AWQ
                             : NF4_INT4_COMPRESSED_TENSORS;
  }

  void gptq(const Json &json) {
    bits(json, "bits");
    const std::string version = lower(json, {"checkpoint_format", "format"}, {"gptq", "gptq_v2"});
    is_gptq_v2 = version == "gptq_v2";
    require(!is_true(json, "is_marlin_format"), json.name,
            ": is_marlin_format is true; gptq and gptq_v2 are read");
    json.choice("pack_dtype", {"int32"}, "int32");
    add_size(json, "group_size");
    std::vector<Flag> symmetric_of{flag(json, "sym")};
    flag(json, "desc_act");
    // GPTQModel's exceptions: a pattern of modules, and the settings that differ. "-:" leaves them
    // dense.
    for (const Json &each : object(json, "dynamic").members) {
      const Json other = named(json, "dynamic " + each.name, each);
      if (each.name.rfind("-:", 0) == 0) continue;
      if (other.has("bits")) bits(other, "bits");
      add_size(other, "group_size");
      if (other.has("sym")) symmetric_of.push_back(flag(other, "sym"));
      flag(other, "desc_act");
    }
    symmetric = same(symmetric_of);
  }
  void awq(const Json &json) {
    bits(json, json.has("bits") ? "bits" : "w_bit");
    lower(json, {"version", "format"}, {"gemm"});
    add_size(json, json.has("group_size") ? "group_size" : "q_group_size");
    if (flag(json, "zero_point") == false) symmetric = true;
    names(json, "modules_to_not_convert");
  }
  void compressed(const Json &json) {
    const Json groups = object(json, "config_groups");
    require(!groups.members.empty(), json.name, ": config_groups is empty");
    require(!is_true(json, "transform_config"), json.name,
            ": it has a transform_config, which is not read");
    if (is_true(json, "sparsity_config")) json.choice("sparsity_config/format", {"dense"});
    std::vector<Flag> symmetric_of;
    for (const Json &each : groups.members) {
      const Json group = named(json, each.name, each);
      const Json &with_format = is_true(group, "format") ? group : json;
      with_format.choice("format", {"pack-quantized"});
      require(!is_true(group, "input_activations") && !is_true(group, "output_activations"),
              group.name, ": quantized activations are not read");
      require(group.has("weights"), group.name, ": weights is missing");
      const Json weights = named(group, "weights", *group.find("weights"));
      require(!is_null(weights, "type"), weights.name, ": type is null; expected: int");
      weights.choice("type", {"int"}, "int");
      bits(weights, "num_bits");
      add_strategy(weights);
      const bool is_said = !is_null(weights, "symmetric");
      symmetric_of.push_back(is_said ? Flag(weights.flag("symmetric", true)) : Flag());
    }
    symmetric = same(symmetric_of);
    names(json, "ignore");
  }
  // Adds the group size of compressed-tensors.
  void add_strategy(const Json &weights) {
    const size_t before = group_sizes.size();
    add_size(weights, "group_size");
    const int64_t size = group_sizes.size() > before ? group_sizes.back() : 0;
    const std::string strategy =
        weights.choice("strategy", {"group", "channel"}, size == -1 ? "channel" : "group");
    group_sizes.resize(before);
    require(strategy == "channel" || size > 0, weights.name, ": strategy is ", strategy,
            ", and group_size ", size);
    group_sizes.push_back(strategy == "channel" ? -1 : size);
  }

  static Json named(const Json &in, const std::string &name, Json value) {
    value.name = in.name + ": " + name;
    require(value.word == "{}", value.name, " is no object");
    return value;
  }
  // Returns an empty object if there is none.
  static Json object(const Json &json, const char *key) {
    return json.has(key) ? named(json, key, *json.find(key)) : Json();
  }
  // Tells whether the key exists with the value null. Python distinguishes that from a missing key.
  static bool is_null(const Json &json, const char *key) {
    return std::any_of(json.members.begin(), json.members.end(),
                       [key](const Json &each) { return each.name == key && each.word == "null"; });
  }
  // Tells whether Python would take the value as true.
  static bool is_true(const Json &json, const char *key) {
    const Json *found = json.find(key);
    if (!found || found->word == "false" || found->word == "\"\"") return false;
    if (found->word == "{}" || found->word == "[]") return !found->members.empty();
    return found->word.find_first_not_of("-0.") != std::string::npos;
  }
  static void bits(const Json &json, const char *key) {
    const int64_t found = json.size(key);
    require(found == 4, json.name, ": ", key, " is ", found, "; weights of 4 bits are read");
  }
  void add_size(const Json &json, const char *key) {
    const Json *found = json.find(key);
    if (!found) return;
    const int64_t size = found->word == "-1" ? -1 : json.size(key, {}, INT32_MAX);
    require(size != 0, json.name, ": ", key, " is 0; expected a number of columns or -1");
    group_sizes.push_back(size);
  }
  static Flag flag(const Json &json, const char *key) {
    return json.has(key) ? Flag(json.flag(key)) : Flag();
  }
  static Flag same(const std::vector<Flag> &all) {
    const bool is_same =
        std::count(all.begin(), all.end(), all.at(0)) == std::ptrdiff_t(all.size());
    return is_same ? all[0] : Flag();
  }
  static void names(const Json &json, const char *key) {
    const Json *found = json.find(key);
    const auto is_string = [](const Json &each) { return each.word[0] == '"'; };
    require(!found || (found->word == "[]" &&
                       std::all_of(found->members.begin(), found->members.end(), is_string)),
            json.name, ": ", key, " is no list of names");
  }
  // Returns the value under either of two keys, in lower case. It must be one of `choices`; without
  // a value the result is the first of them. Throws if the two keys disagree.
  static std::string lower(const Json &json, const std::vector<const char *> &keys,
                           const std::vector<std::string> &choices) {
    std::string said;
    for (const char *key : keys) {
      if (!is_true(json, key)) continue;
      std::string found = json.text(key);
      for (char &c : found) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      json.require_choice(key, found, choices);
      require(said.empty() || said == found, json.name, ": ", key, " is ", found, ", but ", keys[0],
              " is ", said);
      said = found;
    }
    return said.empty() ? choices[0] : said;
  }
};

}  // namespace NF4_INLINE_NAMESPACE
}  // namespace nf4

#endif
