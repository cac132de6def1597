// Generates greedily from a checkpoint of LLaMA's shape in 4 bits, such as `nf4 quantize` writes,
// on the GPU or the CPU, with libnf4 and CUDA's runtime or libnf4 alone. Decode is bound by reading
// the weights. docs/engines.md explains it.
#include "cpu.hpp"

void generate_on_gpu(const Options &options);  // gpu.cu

constexpr const char *kUsage =
    "llama FOLDER [--tokens N] [--cpu] [--threads N] [--context N] [--logits FILE] PROMPT...\n"
    "1 to 8 prompts: token ids with commas.\n";

// Throws what is wrong. Numbers are read as JSON has them.
static Options parse(const std::vector<std::string> &words) {
  Options options;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--cpu") {
      options.cpu = true;
    } else if (words[i] == "--logits") {
      options.logits = words.at(++i);
    } else if (const auto option = options.numbers.find(words[i]);
               option != options.numbers.end()) {
      option->second = nf4::Json("", words.at(++i)).size("", {}, INT32_MAX);
    } else if (options.folder.empty()) {
      options.folder = words[i];
    } else {
      options.prompts.push_back(nf4::Json("PROMPT", "[" + words[i] + "]").sizes(""));
      require(!options.prompts.back().empty(), "PROMPT is empty");
    }
  }
  const size_t prompts = options.prompts.size();
  require(options.numbers["--tokens"] && 0 < prompts && prompts <= kMaxBatch, "how many?");
  return options;
}

int main(int count, char **words) try {
  Options options;
  try {
    options = parse({words + 1, words + count});
  } catch (const std::exception &) {
    std::fputs(kUsage, stderr);
    return 2;
  }
#ifdef LLAMA_ON_GPU
  if (!options.cpu) return generate_on_gpu(options), 0;
#endif
  Cpu cpu(options.numbers["--threads"]);
  generate(options, cpu);
  return 0;
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
