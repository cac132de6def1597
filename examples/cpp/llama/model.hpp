// The model: the same for each backend, which has the memory and the kernels.
#pragma once

#include <algorithm>

#include "kernels.hpp"
#include "weights.hpp"

template <class Backend>
class Llama {
 public:
  using T = typename Backend::T;
  static constexpr int64_t kChunk = 512;  // rows of a prompt that are computed at a time

  Llama(const Checkpoint &checkpoint, const Config &config, Backend &backend, int64_t batch,
        int64_t positions)
      : config_(config), backend_(backend), heads_{config.heads, config.kv_heads, config.head_dim} {
    Loader<Backend> loader(checkpoint, config, backend);
    const int64_t hidden = config.hidden, wide = config.intermediate;
    const int64_t q = heads_.queries * heads_.dim, kv = heads_.keys * heads_.dim;
    const bool biased = config.attention_bias;
    embedding_ = loader.dense("model.embed_tokens.weight", {config.vocabulary, hidden});
    for (int64_t i = 0; i < config.layers; ++i) {
      const std::string name = "model.layers." + std::to_string(i) + ".";
      const std::string self = name + "self_attn.", mlp = name + "mlp.";
      const auto cache = [&] {
        return allocate(batch * positions * kv, "the KV cache, of which --context is the size,");
      };
      layers_.push_back(
          {loader.dense(name + "input_layernorm.weight", {hidden}),
           loader.dense(name + "post_attention_layernorm.weight", {hidden}),
           loader.group(self, {{"q_proj", q}, {"k_proj", kv}, {"v_proj", kv}}, hidden, biased),
           loader.group(self, {{"o_proj", hidden}}, q, biased),
           loader.group(mlp, {{"gate_proj", wide}, {"up_proj", wide}}, hidden, config.mlp_bias),
           loader.group(mlp, {{"down_proj", hidden}}, wide, config.mlp_bias),
           {cache(), cache(), positions}});
    }
    norm_ = loader.dense("model.norm.weight", {hidden});
    if (config.tied) {
      head_.parts.push_back({config.vocabulary, hidden});
      head_.parts[0].dense = embedding_;
      head_.rows = config.vocabulary;
    } else {
      head_ = loader.group("", {{"lm_head", config.vocabulary}}, hidden, false);
    }
    frequencies_ = loader.upload(config.frequencies.data(), config.frequencies.size(), "RoPE");

    const int64_t most = std::max(kChunk, batch);
    x_ = allocate(most * hidden, "x");
    normed_ = allocate(most * hidden, "a norm");
    added_ = allocate(most * hidden, "a layer's output");
    attended_ = allocate(most * q, "attention");
    both_ = allocate(most * std::max(heads_.width(), 2 * wide), "q, k and v, or gate and up");
    inner_ = allocate(most * wide, "the MLP");
    logits_ = allocate(batch * config.vocabulary, "the logits");
    prompt_ = rows(most);
    next_ = rows(batch);
    for (const Layer &layer : layers_)
      for (const Group *group : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
        backend.reserve(*group, most);
    backend.reserve(head_, batch);
  }

  // Reads the prompts, and chooses the token after each.
  void prefill(const std::vector<std::vector<int32_t>> &prompts) {
    std::vector<int32_t> last, index;
    for (const std::vector<int32_t> &prompt : prompts) {
      const auto sequence = static_cast<int32_t>(index.size()),
                 size = static_cast<int32_t>(prompt.size());
      for (int32_t begin = 0; begin < size; begin += kChunk) {
        prompt_.count = std::min<int64_t>(kChunk, size - begin);
        std::vector<int32_t> positions;
        for (int32_t i = 0; i < prompt_.count; ++i) positions.push_back(begin + i);
        backend_.upload(prompt_.token, prompt.data() + begin, prompt_.count);
        backend_.upload(prompt_.position, positions.data(), prompt_.count);
        backend_.upload(prompt_.sequence, std::vector<int32_t>(prompt_.count, sequence).data(),
                        prompt_.count);
        layers(prompt_);
      }
      predict(prompt_.count - 1, 1, logits_ + sequence * config_.vocabulary);
      last.push_back(size - 1);
      index.push_back(sequence);
    }
    backend_.upload(next_.position, last.data(), next_.count);
    backend_.upload(next_.sequence, index.data(), next_.count);
    backend_.choose(logits_, config_.vocabulary, next_);
  }

  // The token after the last one, of each sequence.
  void decode() {
    backend_.repeat([this] {
      layers(next_);
      predict(0, next_.count, logits_);
      backend_.choose(logits_, config_.vocabulary, next_);
    });
  }

  std::vector<int32_t> tokens() const { return backend_.download(next_.token, next_.count); }
  std::vector<T> logits() const {
    return backend_.download(logits_, next_.count * config_.vocabulary);
  }

 private:
  struct Layer {
    const T *input_norm, *attention_norm;
    Group qkv, o, gate_up, down;
    Cache<T> cache;
  };

  T *allocate(int64_t count, const char *what) {
    return backend_.template allocate<T>(count, what);
  }
  Rows rows(int64_t count) {
    const auto numbers = [&] { return backend_.template allocate<int32_t>(count, "tokens"); };
    return {numbers(), numbers(), numbers(), count};
  }

  void layers(const Rows &rows) {
    const int64_t m = rows.count, hidden = config_.hidden, wide = config_.intermediate;
    backend_.for_each(m * hidden, Embed<T>{embedding_, rows.token, hidden, x_});
    const T *added = nullptr;
    for (const Layer &layer : layers_) {
      backend_.norm(x_, added, layer.input_norm, config_.eps, m, hidden, normed_);
      backend_.products(layer.qkv, normed_, m, both_);
      backend_.for_each(m * heads_.width() / 2,
                        Rotate<T>{both_, rows, heads_, layer.cache, frequencies_});
      backend_.attention(both_, rows, heads_, layer.cache, attended_);
      backend_.products(layer.o, attended_, m, added_);
      backend_.norm(x_, added_, layer.attention_norm, config_.eps, m, hidden, normed_);
      backend_.products(layer.gate_up, normed_, m, both_);
      backend_.for_each(m * wide, Swiglu<T>{both_, wide, inner_});
      backend_.products(layer.down, inner_, m, added_);
      added = added_;
    }
  }
  // Of rows `first` on.
  void predict(int64_t first, int64_t m, T *logits) {
    const int64_t offset = first * config_.hidden;
    backend_.norm(x_ + offset, added_ + offset, norm_, config_.eps, m, config_.hidden, normed_);
    backend_.products(head_, normed_, m, logits);
  }

  const Config &config_;
  Backend &backend_;
  Heads heads_;
  std::vector<Layer> layers_;
  Group head_;
  const T *embedding_, *norm_;
  const float *frequencies_;
  T *x_, *normed_, *added_, *attended_, *both_, *inner_, *logits_;
  Rows prompt_, next_;
};
