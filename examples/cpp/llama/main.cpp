// Generates greedily from a checkpoint of LLaMA's shape in 4 bits, such as `nf4 quantize` writes,
// on the GPU or the CPU, with libnf4 and CUDA's runtime or libnf4 alone. Decode is bound by reading
// the weights. docs/engines.md explains it.
#include <future>
#include <thread>

#include "model.hpp"

void generate_on_gpu(const Options &options);  // gpu.cu

// A number in bf16, the upper half of a float.
struct Bf16 {
  uint16_t bits;

  Bf16() = default;
  explicit Bf16(float value) {  // rounds to nearest even
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    bits = value == value ? (word + 0x7fff + (word >> 16 & 1)) >> 16 : 0x7fff;
  }
  operator float() const { return of(uint32_t{bits} << 16); }
  static float of(uint32_t word) {
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

#ifdef __AVX2__
constexpr int kRegister = 32;  // bytes
#else
constexpr int kRegister = 16;
#endif

constexpr int kAhead = 128;  // vectors by which a weight is prefetched

// Multiplies the upper and the lower halves of 32-bit words apart. Widening the numbers in order
// takes shuffles, which bound the head.
inline void add_products(float *sums, const Vector<Bf16, kVector> &u,
                         const Vector<Bf16, kVector> &v) {
  using Words = uint32_t __attribute__((vector_size(kRegister), aligned(4), may_alias));
  using Floats = float __attribute__((vector_size(kRegister), aligned(4), may_alias));
  const auto *a = reinterpret_cast<const Words *>(&u), *b = reinterpret_cast<const Words *>(&v);
  auto *to = reinterpret_cast<Floats *>(sums);
  __builtin_prefetch(&u + kAhead);
  for (int i = 0; i < 2 * kVector / kRegister; ++i) {
    to[2 * i] += (Floats)(a[i] << 16) * (Floats)(b[i] << 16);
    to[2 * i + 1] += (Floats)(a[i] & 0xffff0000) * (Floats)(b[i] & 0xffff0000);
  }
}

// Runs the model on the CPU, in fp32 or bf16: libnf4 computes the products, and teams of one thread
// the rest.
template <class Number>
class Cpu {
 public:
  template <int>
  struct Team {
    static constexpr int rank = 0, size = 1;
    float sum(float value) const { return value; }
    float max(float value) const { return value; }
    void sync() const {}
    float *memory(size_t count) const {
      thread_local std::vector<float> memory;
      memory.resize(std::max(memory.size(), count));
      return memory.data();
    }
  };
  using T = Number;
  static constexpr bool kReadsHost = true;

  explicit Cpu(int64_t threads)
      : threads_(threads ? threads : std::max(1u, std::thread::hardware_concurrency())) {}

  // Returns NULL if the sum is more than the memory of the machine; malloc alone would not fail.
  void *allocate(size_t bytes) {
    taken_ += bytes;
    const size_t all = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    return memory_.emplace_back(taken_ < all ? std::malloc(bytes) : nullptr, std::free).get();
  }
  void *copy(void *to, const void *from, size_t bytes) { return std::memcpy(to, from, bytes); }
  void multiply(const nf4::Products &products) { products.cpu(static_cast<int32_t>(threads_)); }
  // Calls a method for 0, 1, ..., count - 1, on as many threads as save more time than their start
  // takes.
  template <auto kMethod, class... Arguments>
  void run(int64_t count, int64_t cost, Step<Cpu> step, Arguments... arguments) {
    const int64_t parts = std::clamp<int64_t>(count * cost >> 18, 1, threads_);
    const auto part = [&](int64_t i) {
      for (int64_t j = count * i / parts; j < count * (i + 1) / parts; ++j)
        (step.*kMethod)({}, static_cast<int>(j), arguments...);
    };
    std::vector<std::future<void>> others;
    for (int64_t i = 1; i < parts; ++i) others.push_back(std::async(std::launch::async, part, i));
    part(0);
    for (std::future<void> &other : others) other.get();
  }
  void repeat(const std::function<void()> &step) { step(); }

 private:
  int64_t threads_;
  size_t taken_ = 0;  // bytes
  std::vector<std::unique_ptr<void, void (*)(void *)>> memory_;
};

constexpr const char *kUsage =
    "llama FOLDER [--tokens N] [--cpu [--bf16]] [--threads N] [--context N] [--logits FILE] "
    "PROMPT...\n"
    "1 to 8 prompts: token ids with commas.\n";

// Prints the usage and exits if the words are not valid. Numbers are read as in JSON.
static Options parse(const std::vector<std::string> &words) try {
  Options options;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--cpu") {
      options.cpu = true;
    } else if (words[i] == "--bf16") {
      options.bf16 = true;
    } else if (words[i] == "--logits") {
      options.logits = words.at(++i);
    } else if (options.numbers.count(words[i])) {
      int64_t &number = options.numbers[words[i]];
      number = nf4::Json("", words.at(++i)).size("", {}, INT32_MAX);
    } else if (options.folder.empty()) {
      options.folder = words[i];
    } else {
      options.prompts.push_back(nf4::Json("", "[" + words[i] + "]").sizes(""));
      require(!options.prompts.back().empty(), "no tokens");
    }
  }
  require(options.numbers["--tokens"] && !options.prompts.empty() && options.prompts.size() <= 8,
          "too few or too many");
  return options;
} catch (const std::exception &) {
  std::fputs(kUsage, stderr);
  std::exit(2);
}

int main(int count, char **words) try {
  const Options options = parse({words + 1, words + count});
#ifdef LLAMA_ON_GPU
  if (!options.cpu) return generate_on_gpu(options), 0;
#endif
  const int64_t threads = options.numbers.at("--threads");
  options.bf16 ? generate(options, Cpu<Bf16>(threads)) : generate(options, Cpu<float>(threads));
  return 0;
} catch (const std::exception &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
