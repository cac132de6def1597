// The model: the same for each backend, which has the memory and the kernels.
#pragma once

#include "kernels.hpp"
#include "weights.hpp"

constexpr size_t kMaxBatch = 8;
constexpr int64_t kChunk = 512;  // rows of a prompt that are computed at a time

template <class Backend>
class Llama {
 public:
  using T = typename Backend::T;

  // All memory is taken here, for `positions` tokens of each of `batch` sequences.
  Llama(const Checkpoint &checkpoint, const Config &config, Backend &backend, int64_t batch,
        int64_t positions)
      : config_(config), backend_(backend), positions_(positions) {
    backend.prepare(config);
    Loader<Backend> loader(checkpoint, config, backend);
    const int64_t hidden = config.hidden, wide = config.intermediate;
    const int64_t q = config.heads * config.head_dim, kv = config.kv_heads * config.head_dim;
    embedding_ = loader.dense("model.embed_tokens.weight", {config.vocabulary, hidden});
    frequencies_ = loader.upload(config.frequencies.data(), config.frequencies.size(), "RoPE");
    norm_ = loader.dense("model.norm.weight", {hidden});
    if (config.tied) {
      head_.parts.push_back({config.vocabulary, hidden, {}, {}, embedding_, nullptr});
      head_.rows = config.vocabulary;
    } else {
      head_ = loader.group("", {{"lm_head", config.vocabulary}}, hidden, false);
    }
    backend.reserve(head_, batch);
    for (int64_t i = 0; i < config.layers; ++i) {
      const std::string name = "model.layers." + std::to_string(i) + ".", mlp = name + "mlp.",
                        self = name + "self_attn.";
      Layer &layer = layers_.emplace_back();
      layer.norms[0] = loader.dense(name + "input_layernorm.weight", {hidden});
      layer.norms[1] = loader.dense(name + "post_attention_layernorm.weight", {hidden});
      layer.qkv = loader.group(self, {{"q_proj", q}, {"k_proj", kv}, {"v_proj", kv}}, hidden,
                               config.attention_bias);
      layer.o = loader.group(self, {{"o_proj", hidden}}, q, config.attention_bias);
      layer.gate_up =
          loader.group(mlp, {{"gate_proj", wide}, {"up_proj", wide}}, hidden, config.mlp_bias);
      layer.down = loader.group(mlp, {{"down_proj", hidden}}, wide, config.mlp_bias);
      for (const Group *group : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
        backend.reserve(*group, kChunk);
      for (T **part : {&layer.keys, &layer.values})
        *part = allocate<T>(batch * positions * kv, "the KV cache (--context)");
    }
    x_ = allocate<T>(kChunk * hidden, "x");
    normed_ = allocate<T>(kChunk * hidden, "a norm");
    added_ = allocate<T>(kChunk * hidden, "a layer's output");
    attended_ = allocate<T>(kChunk * q, "attention");
    both_ = allocate<T>(kChunk * std::max(q + 2 * kv, 2 * wide), "q, k and v, or gate and up");
    inner_ = allocate<T>(kChunk * wide, "the MLP");
    logits_ = allocate<T>(batch * config.vocabulary, "the logits");
    prompt_ = rows(kChunk);
    next_ = rows(batch);
  }

  // Reads the prompts, and chooses the token after each.
  void prefill(const std::vector<std::vector<int32_t>> &prompts) {
    std::vector<Row> last;
    for (const std::vector<int32_t> &prompt : prompts) {
      const auto sequence = static_cast<int32_t>(last.size());
      std::vector<Row> rows;
      for (const int32_t token : prompt)
        rows.push_back({token, static_cast<int32_t>(rows.size()), sequence});
      for (size_t begin = 0; begin < rows.size(); begin += prompt_.count) {
        prompt_.count = std::min<int64_t>(kChunk, rows.size() - begin);
        backend_.upload(prompt_.row, rows.data() + begin, prompt_.count);
        layers(prompt_);
      }
      predict(prompt_.count - 1, 1, logits_ + sequence * config_.vocabulary);
      last.push_back(rows.back());
    }
    backend_.upload(next_.row, last.data(), next_.count);
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

  std::vector<int32_t> tokens() const {
    std::vector<int32_t> tokens;
    for (const Row &row : backend_.download(next_.row, next_.count)) tokens.push_back(row.token);
    return tokens;
  }
  std::vector<T> logits() const {
    return backend_.download(logits_, next_.count * config_.vocabulary);
  }

 private:
  struct Layer {
    const T *norms[2];
    Group qkv, o, gate_up, down;
    T *keys, *values;
  };

  template <class U>
  U *allocate(int64_t count, const char *what) {
    return backend_.template allocate<U>(count, what);
  }
  Rows rows(int64_t count) { return {allocate<Row>(count, "tokens"), count}; }

  void layers(const Rows &rows) {
    const int64_t m = rows.count, wide = config_.intermediate;
    const int hidden = static_cast<int>(config_.hidden);
    backend_.for_each(m * hidden, Embed<T>{embedding_, rows, hidden, x_});
    const T *added = nullptr;
    for (const Layer &layer : layers_) {
      const Attention<T> attention{int(config_.heads),
                                   int(config_.kv_heads),
                                   int(config_.head_dim),
                                   int(positions_),
                                   layer.keys,
                                   layer.values,
                                   both_,
                                   rows,
                                   attended_};
      backend_.norm(m, {x_, added, layer.norms[0], config_.eps, hidden, normed_});
      backend_.products(layer.qkv, normed_, m, both_);
      backend_.for_each(m * attention.width() / 2, Rotate<T>{attention, frequencies_});
      backend_.attention(attention);
      backend_.products(layer.o, attended_, m, added_);
      backend_.norm(m, {x_, added_, layer.norms[1], config_.eps, hidden, normed_});
      backend_.products(layer.gate_up, normed_, m, both_);
      backend_.for_each(m * wide, Swiglu<T>{both_, int(wide), inner_});
      backend_.products(layer.down, inner_, m, added_);
      added = added_;
    }
  }
  // The logits of m rows, from row `first` on.
  void predict(int64_t first, int64_t m, T *logits) {
    const int hidden = static_cast<int>(config_.hidden);
    backend_.norm(
        m, {x_ + first * hidden, added_ + first * hidden, norm_, config_.eps, hidden, normed_});
    backend_.products(head_, normed_, m, logits);
  }

  const Config &config_;
  Backend &backend_;
  int64_t positions_;
  std::vector<Layer> layers_;
  Group head_;
  const T *embedding_, *norm_;
  const float *frequencies_;
  T *x_, *normed_, *added_, *attended_, *both_, *inner_, *logits_;
  Rows prompt_, next_;
};
