// What the program does, on either backend.
#pragma once

#include <chrono>
#include <cstdio>
#include <memory>

#include "model.hpp"

struct Options {
  std::string folder, logits;
  int64_t tokens = 64, context = 0, threads = 0;
  bool cpu = false;
  std::vector<std::vector<int32_t>> prompts;
};

void generate_on_gpu(const Options &options);  // gpu.cu

// Chooses the most likely tokens after the prompts, and prints them.
template <class Backend>
void generate(const Options &options, Backend &backend) {
  const Checkpoint checkpoint(options.folder);
  const Config config(checkpoint.config());
  size_t needed = 0;
  for (const auto &prompt : options.prompts) {
    needed = std::max(needed, prompt.size() + options.tokens);
    for (const int32_t token : prompt)
      require(token < config.vocabulary, "token ", token, " is outside the vocabulary of ",
              config.vocabulary);
  }
  const size_t context = options.context ? options.context : needed;
  require(needed <= context && needed <= size_t(config.context), needed,
          " tokens are more than --context or max_position_embeddings");
  std::unique_ptr<FILE, int (*)(FILE *)> file(nullptr, std::fclose);
  if (!options.logits.empty()) file.reset(std::fopen(options.logits.c_str(), "wb"));
  require(options.logits.empty() || file, options.logits, ": cannot be written");
  Llama<Backend> model(checkpoint, config, backend, options.prompts.size(), context);

  std::vector<std::string> lines(options.prompts.size());
  std::vector<double> times;  // of prefill, then of each step; milliseconds
  for (int64_t step = 0; step < options.tokens; ++step) {
    const auto began = std::chrono::steady_clock::now();
    if (step == 0)
      model.prefill(options.prompts);
    else
      model.decode();
    const std::vector<Row> rows = model.rows();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - began;
    times.push_back(time.count());
    for (size_t i = 0; i < lines.size(); ++i)
      lines[i] += (step ? "," : "") + std::to_string(rows[i].token);
    if (!file) continue;
    const auto logits = model.logits();
    const std::vector<float> values(logits.begin(), logits.end());
    std::fwrite(values.data(), sizeof(float), values.size(), file.get());
  }
  require(!file || (std::fflush(file.get()) == 0 && !std::ferror(file.get())), options.logits,
          ": writing failed");
  for (const std::string &line : lines) std::puts(line.c_str());
  std::fprintf(stderr, "%s, prefill %.2f ms", Backend::kName, times[0]);
  std::sort(times.begin() + 1, times.end());
  const double decode = times[times.size() / 2];
  if (times.size() > 1)
    std::fprintf(stderr, ", decode %.3f ms a step, %.1f tokens/s", decode,
                 lines.size() * 1e3 / decode);
  std::fputs("\n", stderr);
}
