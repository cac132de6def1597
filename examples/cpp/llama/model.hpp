// The model: the same for each backend, which has the memory and runs the kernels.
#pragma once

#include "kernels.hpp"

constexpr int kMaxBatch = 8;
constexpr int kChunk = 512;  // rows of a prompt that are computed at a time

template <class Backend>
class Llama {
 public:
  using T = typename Backend::T;
  using S = Step<Backend>;

  // Takes all memory, for `context` tokens of each of `batch` sequences, but the workspace.
  Llama(const Checkpoint &checkpoint, const Config &config, Backend &backend, int64_t batch,
        int64_t context)
      : backend_(backend), step_(config) {
    step_.m = static_cast<int>(batch);
    step_.context = static_cast<int>(context);
    backend.prepare(step_);
    Loader<Backend> loader{checkpoint, checkpoint.config(), backend};
    const int64_t hidden = config.hidden, wide = config.wide;
    const int64_t q = config.heads * config.dim, kv = config.kv_heads * config.dim;
    const std::vector<float> rope = frequencies(loader.config, config.dim);
    embedding_ = loader.dense("model.embed_tokens.weight", {config.vocabulary, hidden});
    norm_ = loader.dense("model.norm.weight", {hidden});
    head_ = {{config.vocabulary, hidden, {}, {}, embedding_, nullptr}};
    if (!config.tied) head_ = loader.group("", {{"lm_head", config.vocabulary}}, hidden, false);
    for (int i = 0; i < config.layers; ++i) {
      const std::string name = "model.layers." + std::to_string(i) + ".", mlp = name + "mlp.",
                        self = name + "self_attn.";
      const bool bias = config.attention_bias;
      layers_.push_back(
          {loader.dense(name + "input_layernorm.weight", {hidden}),
           loader.dense(name + "post_attention_layernorm.weight", {hidden}),
           loader.group(self, {{"q_proj", q}, {"k_proj", kv}, {"v_proj", kv}}, hidden, bias),
           loader.group(self, {{"o_proj", hidden}}, q, bias),
           loader.group(mlp, {{"gate_proj", wide}, {"up_proj", wide}}, hidden, config.mlp_bias),
           loader.group(mlp, {{"down_proj", hidden}}, wide, config.mlp_bias),
           backend.template allocate<T>(batch * context * kv, "the KV cache (--context)"),
           backend.template allocate<T>(batch * context * kv, "the KV cache (--context)")});
    }
    step_.frequencies = loader.upload(rope.data(), rope.size(), "RoPE");
    step_.rows = backend.template allocate<Row>(kChunk, "tokens");
    step_.logits = backend.template allocate<T>(batch * config.vocabulary, "the logits");
    for (const auto &[memory, width] : {std::pair{&step_.x, hidden},
                                        {&step_.normed, hidden},
                                        {&step_.added, hidden},
                                        {&step_.attended, q},
                                        {&step_.both, std::max(q + 2 * kv, 2 * wide)},
                                        {&step_.inner, wide}})
      *memory = backend.template allocate<T>(kChunk * width, "activations");
  }

  // Reads the prompts, and chooses the token after each.
  void prefill(const std::vector<std::vector<int32_t>> &prompts) {
    std::vector<Row> last;
    for (const std::vector<int32_t> &prompt : prompts) {
      const auto sequence = static_cast<int32_t>(last.size());
      std::vector<Row> rows;
      for (const int32_t token : prompt)
        rows.push_back({token, static_cast<int32_t>(rows.size()), sequence});
      S step = step_;
      for (size_t begin = 0; begin < rows.size(); begin += step.m) {
        step.m = std::min<int64_t>(kChunk, rows.size() - begin);
        backend_.copy(step.rows, rows.data() + begin, step.m * sizeof(Row));
        layers(step);
      }
      step.x += int64_t{step.m - 1} * step.hidden;
      step.added += int64_t{step.m - 1} * step.hidden;
      step.logits += int64_t{sequence} * step.vocabulary;
      step.m = 1;
      predict(step);
      last.push_back(rows.back());
    }
    backend_.copy(step_.rows, last.data(), last.size() * sizeof(Row));
    choose();
  }

  // The token after the last one, of each sequence.
  void decode() {
    backend_.repeat([this] {
      layers(step_);
      predict(step_);
      choose();
    });
  }

  std::vector<Row> rows() const { return host(step_.rows, step_.m); }
  std::vector<T> logits() const { return host(step_.logits, step_.m * step_.vocabulary); }

 private:
  struct Layer {
    const T *norm, *mlp_norm;
    Group qkv, o, gate_up, down;
    T *keys, *values;
  };

  template <class U>
  std::vector<U> host(const U *from, int64_t count) const {
    std::vector<U> values(count);
    backend_.copy(values.data(), from, count * sizeof(U));
    return values;
  }
  // `cost` of each of `count` items, in multiply-adds, about.
  template <auto kMethod, class... Arguments>
  void run(int64_t count, int64_t cost, const S &step, Arguments... arguments) {
    backend_.template run<kMethod>(count, cost, step, arguments...);
  }
  void choose() { run<&S::choose>(step_.m, step_.vocabulary, step_); }
  void multiply(const Group &group, const S &step, const T *x, T *y) {
    const Products products(group, x, step.m, y);
    backend_.multiply(products);
    for (size_t i = 0; i < products.dense.size(); ++i)
      run<&S::dense>(products.dense[i]->rows, products.dense[i]->cols * step.m, step,
                     static_cast<const T *>(products.dense[i]->dense), products.dense_args[i]);
  }
  void layers(const S &s) {
    const int64_t m = s.m, keys = s.context;
    run<&S::embed>(m * s.hidden, 1, s, embedding_);
    for (const Layer &layer : layers_) {
      run<&S::norm>(m, s.hidden, s, layer.norm);
      multiply(layer.qkv, s, s.normed, s.both);
      run<&S::rotate>(m * (s.heads + 2 * s.kv_heads) * s.dim / 2, 16, s, layer.keys, layer.values);
      run<&S::attend>(m * s.heads, 2 * keys * s.dim, s, layer.keys, layer.values);
      multiply(layer.o, s, s.attended, s.added);
      run<&S::norm>(m, s.hidden, s, layer.mlp_norm);
      multiply(layer.gate_up, s, s.normed, s.both);
      run<&S::swiglu>(m * s.wide, 8, s);
      multiply(layer.down, s, s.inner, s.added);
    }
  }
  void predict(const S &step) {
    run<&S::norm>(step.m, step.hidden, step, norm_);
    multiply(head_, step, step.normed, step.logits);
  }

  Backend &backend_;
  S step_;
  std::vector<Layer> layers_;
  Group head_;
  const T *embedding_, *norm_;
};
