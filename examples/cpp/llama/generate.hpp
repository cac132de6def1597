// What the program does, on either backend.
#pragma once

#include <chrono>
#include <cstdio>

#include "model.hpp"

struct Options {
  std::string folder, logits;
  int64_t tokens = 64, context = 0, threads = 0;
  bool cpu = false;
  std::vector<std::vector<int32_t>> prompts;
};

bool generate_on_gpu(const Options &options);  // false where there is none: gpu.cu

// Chooses the most likely tokens after the prompts, and prints them.
template <class Backend>
void generate(const Options &options, Backend &backend) {
  using Clock = std::chrono::steady_clock;
  const Checkpoint checkpoint(options.folder);
  const Config config(checkpoint.config);
  int64_t longest = 0, all = 0;
  for (const auto &prompt : options.prompts) {
    longest = std::max<int64_t>(longest, prompt.size());
    all += prompt.size();
    for (const int32_t token : prompt)
      require(token < config.vocabulary, "token ", token, " is outside the vocabulary of ",
              config.vocabulary);
  }
  const int64_t needed = longest + options.tokens;
  const int64_t context = options.context ? options.context : needed;
  require(needed <= std::min(context, config.positions), needed,
          " tokens are more than --context or max_position_embeddings");
  std::unique_ptr<FILE, int (*)(FILE *)> file(nullptr, std::fclose);
  if (!options.logits.empty()) file.reset(std::fopen(options.logits.c_str(), "wb"));
  require(options.logits.empty() || file, options.logits, ": cannot be written");
  Llama<Backend> model(checkpoint, config, backend, options.prompts.size(), context);

  std::vector<std::string> lines(options.prompts.size());
  std::vector<double> times;  // of prefill, then of each step; milliseconds
  for (int64_t step = 0; step < options.tokens; ++step) {
    const auto began = Clock::now();
    if (step == 0)
      model.prefill(options.prompts);
    else
      model.decode();
    const std::vector<int32_t> tokens = model.tokens();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - began).count());
    for (size_t i = 0; i < lines.size(); ++i)
      lines[i] += (step ? "," : "") + std::to_string(tokens[i]);
    if (!file) continue;
    for (const auto logit : model.logits()) {
      const auto value = static_cast<float>(logit);
      std::fwrite(&value, sizeof value, 1, file.get());
    }
  }
  require(!file || (std::fflush(file.get()) == 0 && !std::ferror(file.get())), options.logits,
          ": writing failed");
  for (const std::string &line : lines) std::puts(line.c_str());
  std::fprintf(stderr, "%s, prefill %lld tokens %.2f ms", Backend::kName,
               static_cast<long long>(all), times[0]);
  std::sort(times.begin() + 1, times.end());
  const double decode = times[times.size() / 2];
  if (times.size() > 1)
    std::fprintf(stderr, ", decode %.3f ms a step, %.1f tokens/s", decode,
                 lines.size() * 1e3 / decode);
  std::fputs("\n", stderr);
}
