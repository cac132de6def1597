// The model, and what the program does with it: the same for each backend, which has the memory and
// runs the kernels.
#pragma once

#include <chrono>
#include <cstdio>

#include "kernels.hpp"

constexpr int kMaxBatch = 8;
constexpr int kChunk = 512;  // rows of a prompt that are computed at a time
constexpr int kParts = 16;   // of the keys of a row's head in decode, on a GPU

struct Options {
  std::string folder, logits;
  int64_t tokens = 64, context = 0, threads = 0;
  bool cpu = false;
  std::vector<std::vector<int64_t>> prompts;
};

template <class Backend>
class Llama {
 public:
  using T = typename Backend::T;
  using S = Step<Backend>;

  // Takes all memory, for `context` tokens of each of `batch` sequences, but the workspace.
  Llama(const nf4::Checkpoint &checkpoint, const Config &config, Backend &backend, int64_t batch,
        int64_t context)
      : checkpoint_(checkpoint), backend_(backend), step_(config), layers_(config.layers) {
    S &s = step_;
    s.m = static_cast<int>(batch);
    s.parts = Backend::kReadsHost ? 1 : kParts;
    s.context = static_cast<int>(context);
    const int64_t hidden = s.hidden, wide = s.wide, q = s.heads * s.dim, kv = s.kv_heads * s.dim;
    const auto rows = [this](int64_t width) { return take<T>(kChunk * width, "activations"); };
    s.x = rows(hidden);
    s.normed = rows(hidden);
    s.added = rows(hidden);
    s.attended = rows(q);
    s.both = rows(std::max(q + 2 * kv, 2 * wide));
    s.inner = rows(wide);
    s.rows = take<Row>(kChunk, "tokens");
    s.partial = take<float>(kChunk * (q + 2 * s.heads), "attention");
    s.arrived = upload(std::vector<int>(kChunk * s.heads), "attention");
    s.frequencies = upload(frequencies(checkpoint.config(), s.dim), "RoPE");
    s.logits = take<T>(batch * s.vocabulary, "the logits");
    last_ = take<T>(batch * hidden, "activations");
    embedding_ = dense("model.embed_tokens.weight", {s.vocabulary, hidden});
    norm_ = dense("model.norm.weight", {hidden});
    head_ = group({{s.tied ? "model.embed_tokens" : "lm_head", s.vocabulary}}, false, last_, hidden,
                  s.logits);
    std::string name = "model.layers.0.";
    for (Layer &layer : layers_) {
      const std::string self = name + "self_attn.", mlp = name + "mlp.";
      layer.norm = dense(name + "input_layernorm.weight", {hidden});
      layer.mlp_norm = dense(name + "post_attention_layernorm.weight", {hidden});
      layer.qkv = group({{self + "q_proj", q}, {self + "k_proj", kv}, {self + "v_proj", kv}},
                        s.attention_bias, s.normed, hidden, s.both);
      layer.o = group({{self + "o_proj", hidden}}, s.attention_bias, s.attended, q, s.added);
      layer.gate_up = group({{mlp + "gate_proj", wide}, {mlp + "up_proj", wide}}, s.mlp_bias,
                            s.normed, hidden, s.both);
      layer.down = group({{mlp + "down_proj", hidden}}, s.mlp_bias, s.inner, wide, s.added);
      layer.keys = take<T>(batch * context * kv, "the KV cache (--context)");
      layer.values = take<T>(batch * context * kv, "the KV cache (--context)");
      name = "model.layers." + std::to_string(&layer - &layers_[0] + 1) + ".";
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
      step.parts = 1;
      for (size_t begin = 0; begin < rows.size(); begin += step.m) {
        step.m = std::min<int64_t>(kChunk, rows.size() - begin);
        backend_.copy(step.rows, rows.data() + begin, step.m * sizeof(Row));
        layers(step);
      }
      step.x += int64_t{step.m - 1} * step.hidden;
      step.added += int64_t{step.m - 1} * step.hidden;
      step.m = 1;
      norm(step, nullptr, norm_, last_ + last.size() * step.hidden);
      last.push_back(rows.back());
    }
    backend_.copy(step_.rows, last.data(), last.size() * sizeof(Row));
    choose();
  }
  // The token after the last one, of each sequence.
  void decode() {
    backend_.repeat([this] {
      layers(step_);
      norm(step_, nullptr, norm_, last_);
      choose();
    });
  }
  std::vector<Row> rows() const { return host(step_.rows, step_.m); }
  std::vector<T> logits() const { return host(step_.logits, step_.m * step_.vocabulary); }

 private:
  // Weights that multiply the same x; their outputs lie side by side in a row of y.
  struct Group {
    nf4::Products products;
    std::vector<std::tuple<int64_t, const T *, nf4_matmul_args>> dense;  // rows, weight
  };
  struct Layer {
    const T *norm, *mlp_norm;
    Group qkv, o, gate_up, down;
    T *keys, *values;
  };

  template <class U>
  U *take(int64_t count, const std::string &what) {
    void *memory = backend_.allocate(count * sizeof(U));
    require(memory, "too little memory: ", what, " takes ", count * sizeof(U) / 1e9, " GB");
    return static_cast<U *>(memory);
  }
  template <class Values, class U = typename Values::value_type>
  U *upload(const Values &values, const std::string &what) {
    U *memory = take<U>(values.size(), what);
    backend_.copy(memory, values.data(), values.size() * sizeof(U));
    return memory;
  }
  template <class U>
  std::vector<U> host(const U *from, int64_t count) const {
    std::vector<U> values(count);
    backend_.copy(values.data(), from, count * sizeof(U));
    return values;
  }
  const T *dense(const std::string &name, const nf4::Shape &shape) {
    const T *&memory = dense_[name];  // once: a tied head is the embedding
    return memory ? memory : memory = upload(checkpoint_.dense<T>(name, shape), name);
  }
  // A weight where it is mapped, or a copy in the backend's memory.
  template <class Weight>
  Weight place(const Weight &weight, const std::string &name) {
    if (Backend::kReadsHost) return weight;
    return nf4::copy_parts(weight, [&](const void *part, int64_t bytes) -> void * {
      return upload(std::string_view(static_cast<const char *>(part), bytes), name);
    });
  }
  Group group(const std::vector<std::pair<std::string, int64_t>> &parts, bool has_bias, const T *x,
              int64_t cols, T *y) {
    Group group;
    const nf4_dtype dtype = sizeof(T) == 4 ? NF4_DTYPE_FP32 : NF4_DTYPE_BF16;
    nf4_matmul_args args{sizeof args, dtype, 0, 0, x, cols, nullptr, y, 0, nullptr};
    for (const auto &part : parts) args.y_stride += part.second;
    for (const auto &[part, rows] : parts) {
      const std::string name = part + ".weight";
      if (has_bias) args.bias = dense(part + ".bias", {rows});
      args.y = y;
      if (checkpoint_.is_nf4(name))
        group.products.add(place(checkpoint_.nf4_weight(name, {rows, cols}), name), args);
      else if (checkpoint_.is_int4(name))
        group.products.add(
            place(checkpoint_.sorted(checkpoint_.int4_weight(name, {rows, cols})), name), args);
      else
        group.dense.emplace_back(rows, dense(name, {rows, cols}), args);
      y += rows;
    }
    return group;
  }

  // `cost` of each of `count` items, in multiply-adds, about.
  template <auto kMethod, class... Arguments>
  void run(const S &step, int64_t count, int64_t cost, Arguments... arguments) {
    backend_.template run<kMethod>(count, cost, step, arguments...);
  }
  void norm(const S &s, const T *table, const T *weight, T *to) {
    run<&S::norm>(s, s.m, s.hidden, table, weight, to);
  }
  void multiply(const S &s, Group &group) {
    group.products.set_rows(s.m);
    backend_.multiply(group.products);
    for (auto &[rows, weight, args] : group.dense) {
      args.m = s.m;
      run<&S::dense>(s, rows, args.x_stride * s.m, weight, args);
    }
  }
  void layers(const S &s) {
    const int64_t m = s.m, keys = s.context;
    const T *table = embedding_;
    for (Layer &layer : layers_) {
      norm(s, std::exchange(table, nullptr), layer.norm, s.normed);
      multiply(s, layer.qkv);
      run<&S::rotate>(s, m * (s.heads + 2 * s.kv_heads) * s.dim / 2, 16, layer.keys, layer.values);
      run<&S::attend>(s, m * s.heads * s.parts, 2 * keys * s.dim, layer.keys, layer.values);
      multiply(s, layer.o);
      norm(s, nullptr, layer.mlp_norm, s.normed);
      multiply(s, layer.gate_up);
      run<&S::swiglu>(s, m * s.wide, 8);
      multiply(s, layer.down);
    }
  }
  // The tokens after the rows in last_.
  void choose() {
    multiply(step_, head_);
    run<&S::choose>(step_, step_.m, step_.vocabulary);
  }

  const nf4::Checkpoint &checkpoint_;
  Backend &backend_;
  S step_;
  std::vector<Layer> layers_;
  Group head_;
  const T *embedding_, *norm_;
  T *last_;  // the last rows of the sequences, after the last norm
  std::map<std::string, const T *> dense_;
};

// Chooses the most likely tokens after the prompts, and prints them.
template <class Backend>
void generate(const Options &options, Backend &backend) {
  const nf4::Checkpoint checkpoint(options.folder);
  const Config config(checkpoint.config());
  int64_t needed = 0;
  for (const auto &prompt : options.prompts) {
    needed = std::max<int64_t>(needed, prompt.size() + options.tokens);
    for (const int64_t token : prompt)
      require(token < config.vocabulary, "token ", token, " is outside the vocabulary of ",
              config.vocabulary);
  }
  const int64_t context = options.context ? options.context : needed;
  require(needed <= std::min<int64_t>(context, config.context), needed,
          " tokens are more than --context or max_position_embeddings");
  std::ofstream file;
  if (!options.logits.empty()) file.open(options.logits, std::ios::binary);
  require(file.good(), options.logits, ": cannot be written");
  Llama<Backend> model(checkpoint, config, backend, options.prompts.size(), context);

  std::vector<std::string> lines(options.prompts.size());
  std::vector<double> times;  // of prefill, then of each step; milliseconds
  for (int64_t step = 0; step < options.tokens; ++step) {
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
  require(file.flush().good(), options.logits, ": writing failed");
  for (const std::string &line : lines) std::puts(line.c_str());
  std::fprintf(stderr, "%s, prefill %.2f ms", Backend::kName, times[0]);
  std::sort(times.begin() + 1, times.end());
  const double decode = times[times.size() / 2];
  if (times.size() > 1)
    std::fprintf(stderr, ", decode %.3f ms a step, %.1f tokens/s", decode,
                 lines.size() * 1e3 / decode);
  std::fputs("\n", stderr);
}
