// Generates greedily from a checkpoint of LLaMA's shape in 4 bits, such as `nf4 quantize` writes,
// on the GPU or the CPU, with libnf4 and CUDA's runtime or libnf4 alone. Decode is bound by reading
// the weights. docs/engines.md explains it.
#include <sstream>

#include "cpu.hpp"
#include "generate.hpp"

constexpr const char *kUsage =
    "llama FOLDER [--tokens N] [--cpu] [--threads N] [--context N] [--logits FILE] PROMPT...\n"
    "1 to 8 prompts: token ids with commas.\n";

static int64_t number(const std::string &text) {
  size_t end = 0;
  const long long value = std::stoll(text, &end);
  if (end != text.size() || value < 0 || value > INT32_MAX) throw std::out_of_range(text);
  return value;
}

// Throws a std::logic_error.
static Options parse(std::vector<std::string> words) {
  Options options;
  std::map<std::string, std::string> values{
      {"--tokens", "64"}, {"--context", "0"}, {"--threads", "0"}, {"--logits", ""}};
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--cpu") {
      options.cpu = true;
    } else if (values.count(words[i])) {
      values[words[i]] = words.at(i + 1);
      ++i;
    } else if (options.folder.empty()) {
      options.folder = words[i];
    } else {
      std::stringstream text(words[i] + ",");
      std::vector<int32_t> &prompt = options.prompts.emplace_back();
      for (std::string token; std::getline(text, token, ',');) prompt.push_back(number(token));
    }
  }
  options.logits = values["--logits"];
  options.tokens = number(values["--tokens"]);
  options.context = number(values["--context"]);
  options.threads = number(values["--threads"]);
  const size_t prompts = options.prompts.size();
  if (!options.tokens || !prompts || prompts > kMaxBatch) throw std::out_of_range("prompts");
  return options;
}

int main(int count, char **words) try {
  Options options;
  try {
    options = parse({words + 1, words + count});
  } catch (const std::logic_error &) {
    std::fputs(kUsage, stderr);
    return 2;
  }
#ifdef LLAMA_ON_GPU
  if (!options.cpu) return generate_on_gpu(options), 0;
#endif
  Cpu cpu(options.threads);
  generate(options, cpu);
  return 0;
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
