// Generates greedily from a checkpoint of LLaMA's shape in 4 bits, such as `nf4 quantize` writes,
// on the GPU or the CPU, with libnf4 and CUDA's runtime or libnf4 alone. Decode is bound by reading
// the weights. docs/engines.md explains it.
#include <sstream>

#include "cpu.hpp"
#include "generate.hpp"

namespace {

constexpr const char *kUsage =
    "llama FOLDER [--tokens N] [--cpu] [--threads N] [--context N] [--logits FILE] PROMPT...\n"
    "1 to 8 prompts: token ids with commas.\n";

int64_t number(const std::string &text) {
  size_t end = 0;
  const long long value = std::stoll(text, &end);
  if (end != text.size() || value < 0 || value > INT32_MAX) throw std::out_of_range(text);
  return value;
}

// Throws a std::logic_error.
Options parse(const std::vector<std::string> &words) {
  Options options;
  const std::map<std::string, int64_t *> numbers{{"--tokens", &options.tokens},
                                                 {"--context", &options.context},
                                                 {"--threads", &options.threads}};
  std::vector<std::string> rest;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string &word = words[i];
    if (word == "--cpu")
      options.cpu = true;
    else if (word == "--logits")
      options.logits = words.at(++i);
    else if (word.rfind("--", 0) == 0)
      *numbers.at(word) = number(words.at(++i));
    else
      rest.push_back(word);
  }
  options.folder = rest.at(0);
  for (size_t i = 1; i < rest.size(); ++i) {
    std::vector<int32_t> tokens;
    std::stringstream text(rest[i]);
    for (std::string each; std::getline(text, each, ',');) tokens.push_back(number(each));
    if (tokens.empty()) throw std::invalid_argument("an empty prompt");
    options.prompts.push_back(tokens);
  }
  if (options.tokens < 1 || options.prompts.empty() || options.prompts.size() > kMaxBatch)
    throw std::out_of_range("tokens or prompts");
  return options;
}

}  // namespace

int main(int count, char **words) try {
  Options options;
  try {
    options = parse({words + 1, words + count});
  } catch (const std::logic_error &) {
    std::fputs(kUsage, stderr);
    return 2;
  }
#ifdef LLAMA_ON_GPU
  if (!options.cpu && generate_on_gpu(options)) return 0;
#endif
  Cpu cpu(options.threads);
  generate(options, cpu);
  return 0;
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
