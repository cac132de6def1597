// Generates greedily from a checkpoint of LLaMA's shape in 4 bits, such as `nf4 quantize` writes.
// docs/engines.md says how it is made. Needs libnf4 and CUDA's runtime, or libnf4 alone.
#include "cpu.hpp"
#include "generate.hpp"

namespace {

constexpr const char *kUsage =
    "llama FOLDER [--tokens N] [--cpu] [--threads N] [--context N] [--logits FILE] [--text] "
    "PROMPT...\n"
    "A prompt is token ids with commas; with --text it is bytes, each of which is a token.\n";

// A number from 0 on; throws std::invalid_argument.
int64_t number(const std::string &text) {
  size_t end = 0;
  const long long value = std::stoll(text, &end);
  if (end != text.size() || value < 0 || value > 2147483647) throw std::invalid_argument(text);
  return value;
}

Options parse(const std::vector<std::string> &words) {
  Options options;
  std::vector<std::string> prompts;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string &word = words[i];
    if (word == "--cpu")
      options.cpu = true;
    else if (word == "--text")
      options.text = true;
    else if (word == "--tokens")
      options.tokens = number(words.at(++i));
    else if (word == "--context")
      options.context = number(words.at(++i));
    else if (word == "--threads")
      options.threads = static_cast<int>(number(words.at(++i)));
    else if (word == "--logits")
      options.logits = words.at(++i);
    else if (word.rfind("--", 0) == 0)
      throw std::invalid_argument(word);
    else if (options.folder.empty())
      options.folder = word;
    else
      prompts.push_back(word);
  }
  for (const std::string &prompt : prompts) {
    std::vector<int32_t> &tokens = options.prompts.emplace_back();
    if (options.text)
      tokens.assign(reinterpret_cast<const uint8_t *>(prompt.data()),
                    reinterpret_cast<const uint8_t *>(prompt.data()) + prompt.size());
    std::stringstream numbers(options.text ? "" : prompt);
    for (std::string each; std::getline(numbers, each, ',');)
      tokens.push_back(static_cast<int32_t>(number(each)));
    if (tokens.empty()) throw std::invalid_argument("an empty prompt");
  }
  if (options.tokens < 1 || prompts.empty() || prompts.size() > size_t{kMaxBatch})
    throw std::invalid_argument("1 to 8 prompts, 1 token or more");
  return options;
}

}  // namespace

int main(int count, char **words) {
  Options options;
  try {
    options = parse({words + 1, words + count});
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s%s\n", kUsage, error.what());
    return 2;
  }
  try {
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
}
