// What the program does, on either backend.
#pragma once

#include <chrono>
#include <cstdio>

#include "model.hpp"

constexpr int64_t kMaxBatch = 8;

struct Options {
  std::string folder, logits;
  int64_t tokens = 64, context = 0;
  int threads = 0;
  bool cpu = false, text = false;
  std::vector<std::vector<int32_t>> prompts;
};

bool generate_on_gpu(const Options &options);  // gpu.cu; false where there is no GPU

inline double milliseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

// Chooses the most likely tokens after the prompts, and prints them.
template <class Backend>
void generate(const Options &options, Backend &backend) {
  const Checkpoint checkpoint(options.folder);
  const Config config(checkpoint.config);
  int64_t longest = 0, all = 0;
  for (const auto &prompt : options.prompts) {
    longest = std::max<int64_t>(longest, prompt.size());
    all += prompt.size();
    for (const int32_t token : prompt)
      require(0 <= token && token < config.vocabulary, "token " + std::to_string(token) +
                                                           " is outside the vocabulary of " +
                                                           std::to_string(config.vocabulary));
  }
  const int64_t needed = longest + options.tokens,
                context = options.context ? options.context : needed;
  require(needed <= context && needed <= config.positions,
          std::to_string(needed) + " tokens are more than --context or max_position_embeddings");
  const auto batch = static_cast<int64_t>(options.prompts.size());
  Llama<Backend> model(checkpoint, config, backend, batch, context);
  std::unique_ptr<FILE, int (*)(FILE *)> file(nullptr, std::fclose);
  if (!options.logits.empty()) file.reset(std::fopen(options.logits.c_str(), "wb"));
  require(options.logits.empty() || file, options.logits + ": cannot be written");

  std::vector<std::vector<int32_t>> chosen(batch);
  std::vector<double> times;
  for (int64_t step = 0; step < options.tokens; ++step) {
    const double began = milliseconds();
    if (step == 0)
      model.prefill(options.prompts);
    else
      model.decode();
    const std::vector<int32_t> tokens = model.tokens();
    times.push_back(milliseconds() - began);
    for (int64_t i = 0; i < batch; ++i) chosen[i].push_back(tokens[i]);
    if (!file) continue;
    for (const auto logit : model.logits()) {
      const auto value = static_cast<float>(logit);
      std::fwrite(&value, sizeof value, 1, file.get());
    }
  }
  for (int64_t i = 0; i < batch; ++i) {
    std::string line;
    if (options.text) line.assign(options.prompts[i].begin(), options.prompts[i].end());
    for (const int32_t token : chosen[i])
      line += options.text ? std::string(token < 256, static_cast<char>(token))
                           : (line.empty() ? "" : ",") + std::to_string(token);
    std::printf("%s\n", line.c_str());
  }
  const double prefill = times[0];
  std::nth_element(times.begin() + 1, times.begin() + (times.size() + 1) / 2, times.end());
  const double decode = times.size() > 1 ? times[(times.size() + 1) / 2] : NAN;
  std::fprintf(stderr, "%s, prefill %lld tokens %.2f ms, decode %.3f ms a step, %.1f tokens/s\n",
               Backend::kName, static_cast<long long>(all), prefill, decode, batch * 1e3 / decode);
}
