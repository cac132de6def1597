// The model and the program, written once for each backend. A backend has the memory and runs the
// kernels.
#pragma once

#include <chrono>
#include <cstdio>
#include <fstream>

#include "kernels.hpp"

constexpr int kChunk = 512;  // rows of a prompt that are computed at a time

struct Options {
  std::string folder, logits;
  std::map<std::string, int64_t> numbers{{"--tokens", 64}, {"--context", 0}, {"--threads", 0}};
  bool cpu = false, bf16 = false;
  std::vector<std::vector<int64_t>> prompts;
};

template <class Backend>
class Llama {
 public:
  using T = typename Backend::T;
  using S = Step<Backend>;

  // Takes all memory except the workspace, for `batch` sequences of up to `context` tokens.
  Llama(const nf4::Checkpoint &checkpoint, Backend &backend, int64_t batch, int64_t context)
      : backend_(backend), step_(checkpoint.config(), kVector), layers_(step_.layers) {
    S &s = step_;
    const int64_t hidden = s.hidden, inner = s.intermediate, q = s.heads * s.head_dim,
                  kv = s.kv_heads * s.head_dim;
    s.m = int(batch), s.context = int(context);
    const auto rows = [this](int64_t width) { return take<T>(kChunk * width, "activations"); };
    for (T **each : {&s.x, &s.normed, &s.added, &s.last}) *each = rows(hidden);
    s.attended = rows(q);
    s.both = rows(std::max(q + 2 * kv, 2 * inner));
    s.inner = rows(inner);
    s.rows = take<Row>(kChunk, "tokens");
    s.logits = take<T>(batch * s.vocabulary, "the logits");
    const auto copy = [this](const void *data, size_t bytes, const std::string &name) {
      return backend_.copy(take<char>(bytes, name), data, bytes);
    };
    nf4::Loader<T> load(checkpoint, Backend::kReadsHost, copy);
    s.frequencies = load.copy(s.rope_frequencies(checkpoint.config()), "RoPE");
    embedding_ = load.dense("model.embed_tokens.weight", {s.vocabulary, hidden});
    norm_ = load.dense("model.norm.weight", {hidden});
    head_ = load.linears("", {{s.tied ? "model.embed_tokens" : "lm_head", s.vocabulary}}, false,
                         s.last, hidden, s.logits);
    for (Layer &layer : layers_) {
      const std::string name = "model.layers." + std::to_string(&layer - layers_.data()) + ".";
      layer.norm = load.dense(name + "input_layernorm.weight", {hidden});
      layer.mlp_norm = load.dense(name + "post_attention_layernorm.weight", {hidden});
      layer.qkv = load.linears(name + "self_attn.", {{"q_proj", q}, {"k_proj", kv}, {"v_proj", kv}},
                               s.attention_bias, s.normed, hidden, s.both);
      layer.o = load.linears(name + "self_attn.", {{"o_proj", hidden}}, s.attention_bias,
                             s.attended, q, s.added);
      layer.gate_up = load.linears(name + "mlp.", {{"gate_proj", inner}, {"up_proj", inner}},
                                   s.mlp_bias, s.normed, hidden, s.both);
      layer.down =
          load.linears(name + "mlp.", {{"down_proj", hidden}}, s.mlp_bias, s.inner, inner, s.added);
      layer.keys = take<T>(batch * context * kv, "the KV cache (--context)");
      layer.values = take<T>(batch * context * kv, "the KV cache (--context)");
    }
  }

  // Reads the prompts, and chooses the token after each.
  void prefill(const std::vector<std::vector<int64_t>> &prompts) {
    std::vector<Row> last;
    for (const std::vector<int64_t> &prompt : prompts) {
      std::vector<Row> rows;
      for (const int64_t token : prompt)
        rows.push_back({int32_t(token), int32_t(rows.size()), int32_t(last.size())});
      S step = step_;
      for (size_t begin = 0; begin < rows.size(); begin += step.m) {
        step.m = std::min<int64_t>(kChunk, rows.size() - begin);
        backend_.copy(step.rows, rows.data() + begin, step.m * sizeof(Row));
        layers(step, step.normed);
      }
      backend_.copy(step.last + last.size() * step.hidden,
                    step.normed + int64_t{step.m - 1} * step.hidden, step.hidden * sizeof(T));
      last.push_back(rows.back());
    }
    backend_.copy(step_.rows, last.data(), last.size() * sizeof(Row));
    choose();
  }
  // Chooses the next token of each sequence.
  void decode() {
    backend_.repeat([this] {
      layers(step_, step_.last);
      choose();
    });
  }
  std::vector<Row> rows() const { return host(step_.rows, step_.m); }
  std::vector<T> logits() const { return host(step_.logits, step_.m * step_.vocabulary); }

 private:
  struct Layer {
    const T *norm, *mlp_norm;
    nf4::Linears<T> qkv, o, gate_up, down;
    T *keys, *values;
  };

  template <class U>
  U *take(int64_t count, const std::string &what) {
    void *memory = backend_.allocate(count * sizeof(U));
    require(memory, "too little memory: ", what, " takes ", count * sizeof(U) / 1e9, " GB");
    return static_cast<U *>(memory);
  }
  template <class U>
  std::vector<U> host(const U *from, int64_t count) const {
    std::vector<U> values(count);
    backend_.copy(values.data(), from, count * sizeof(U));
    return values;
  }
  // `cost` is about the number of multiply-adds of each of `count` items.
  template <auto kMethod, class... Arguments>
  void run(const S &step, int64_t count, int64_t cost, Arguments... arguments) {
    backend_.template run<kMethod>(count, cost, step, arguments...);
  }
  void multiply(const S &s, nf4::Linears<T> &linears) {
    linears.set_rows(s.m);
    backend_.multiply(linears.products);
    for (const auto &[weight, rows, args] : linears.dense)
      run<&S::dense>(s, rows, args.x_stride * s.m, weight, args);
  }
  // `to` gets the rows after the last norm.
  void layers(const S &s, T *to) {
    const int64_t m = s.m, keys = s.context, dim = s.head_dim, all = s.heads + 2 * s.kv_heads;
    const T *table = embedding_;
    for (Layer &layer : layers_) {
      run<&S::norm>(s, m, s.hidden, std::exchange(table, nullptr), layer.norm, s.normed);
      multiply(s, layer.qkv);
      run<&S::rotate>(s, m * all * dim / 2, 16, layer.keys, layer.values);
      run<&S::attend>(s, m * s.heads, 2 * keys * dim, layer.keys, layer.values);
      multiply(s, layer.o);
      run<&S::norm>(s, m, s.hidden, table, layer.mlp_norm, s.normed);
      multiply(s, layer.gate_up);
      run<&S::swiglu>(s, m * s.intermediate, 8);
      multiply(s, layer.down);
    }
    run<&S::norm>(s, m, s.hidden, table, norm_, to);
  }
  // Chooses the tokens after the rows in `last`.
  void choose() {
    multiply(step_, head_);
    run<&S::choose>(step_, step_.m, step_.vocabulary);
  }

  Backend &backend_;
  S step_;
  std::vector<Layer> layers_;
  nf4::Linears<T> head_;
  const T *embedding_, *norm_;
};

// Chooses the most likely tokens after the prompts, and prints them.
template <class Backend>
void generate(const Options &options, Backend backend) {
  const nf4::Checkpoint checkpoint(options.folder);
  const nf4::LlamaConfig config(checkpoint.config());
  const int64_t tokens = options.numbers.at("--tokens"), given = options.numbers.at("--context");
  int64_t needed = 0;
  for (const auto &prompt : options.prompts) {
    needed = std::max<int64_t>(needed, prompt.size() + tokens);
    for (const int64_t token : prompt)
      require(token < config.vocabulary, "token ", token, " is outside the vocabulary of ",
              config.vocabulary);
  }
  const int64_t context = given ? given : needed;
  require(needed <= std::min<int64_t>(context, config.positions), needed,
          " tokens are more than --context or max_position_embeddings");
  std::ofstream file(options.logits, std::ios::binary);
  require(file.good() || options.logits.empty(), options.logits, ": cannot be written");
  Llama<Backend> model(checkpoint, backend, options.prompts.size(), context);

  std::vector<std::string> lines(options.prompts.size());
  std::vector<double> times;  // milliseconds of prefill, then of each step
  for (int64_t step = 0; step < tokens; ++step) {
    const auto began = std::chrono::steady_clock::now();
    step == 0 ? model.prefill(options.prompts) : model.decode();
    const std::vector<Row> rows = model.rows();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - began;
    times.push_back(time.count());
    for (size_t i = 0; i < lines.size(); ++i)
      lines[i] += (step ? "," : "") + std::to_string(rows[i].token);
    if (!file.is_open()) continue;
    const auto logits = model.logits();
    const std::vector<float> values(logits.begin(), logits.end());
    file.write(reinterpret_cast<const char *>(values.data()), values.size() * sizeof(float));
  }
  require(file.flush().good() || options.logits.empty(), options.logits, ": writing failed");
  for (const std::string &line : lines) std::puts(line.c_str());
  std::sort(times.begin() + 1, times.end());
  const double decode = times[times.size() / 2], rate = lines.size() * 1e3 / decode;
  std::fprintf(stderr, "%s, prefill %.2f ms", Backend::kReadsHost ? "cpu" : "gpu", times[0]);
  if (tokens > 1) std::fprintf(stderr, ", decode %.3f ms a step, %.1f tokens/s", decode, rate);
  std::fputs("\n", stderr);
}
