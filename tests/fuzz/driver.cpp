// Runs LLVMFuzzerTestOneInput, as libFuzzer does, with GCC's -fsanitize-coverage=trace-pc: inputs
// that reach code in a new order are kept and changed further.
//
//     fuzz_api RUNS [--corpus FILE] [--keep FILE] [--report FILE] [--seed N] [--input FILE]
//
// A corpus has an input a line, in hexadecimal; --keep writes one, of the inputs that reached new
// code, not only a new order. --input runs one input alone, a file of bytes. The inputs run in a
// child; one that ends it, or takes a minute, is a finding: it is left beside the report, and the
// exit status is 1.
#include "driver.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kMostBytes = 512;
constexpr size_t kEdges = 1 << 16;
constexpr unsigned kSecondsOfAnInput = 60;

// Shared with the child.
struct Shared {
  uint64_t runs, calls, refused, places, edges, kept;
  size_t size;
  uint8_t input[kMostBytes];
};
Shared before_main;
Shared *shared = &before_main;

uintptr_t previous;  // the place before, of this input

struct Options {
  uint64_t runs = 0, seed = 1;
  std::string corpus, keep, report, input;
};

Options parse(int count, char **words) {
  Options options;
  if (count > 1) options.runs = std::strtoull(words[1], nullptr, 10);
  for (int i = 2; i + 1 < count; i += 2) {
    const std::string name = words[i], value = words[i + 1];
    if (name == "--corpus") options.corpus = value;
    if (name == "--keep") options.keep = value;
    if (name == "--report") options.report = value;
    if (name == "--seed") options.seed = std::stoull(value);
    if (name == "--input") options.input = value;
  }
  return options;
}

std::vector<Bytes> read_corpus(const std::string &path) {
  std::vector<Bytes> corpus;
  std::ifstream lines(path);
  for (std::string line; std::getline(lines, line);) {
    Bytes bytes;
    for (size_t i = 0; i + 1 < line.size(); i += 2)
      bytes.push_back(static_cast<uint8_t>(std::stoi(line.substr(i, 2), nullptr, 16)));
    corpus.push_back(bytes);
  }
  return corpus;
}

void write_corpus(const std::string &path, const std::vector<Bytes> &corpus) {
  std::ofstream lines(path);
  for (const Bytes &bytes : corpus) {
    for (const uint8_t byte : bytes) {
      char text[3];
      std::snprintf(text, sizeof text, "%02x", byte);
      lines << text;
    }
    lines << '\n';
  }
}

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : engine_(seed) {}

  void run(Bytes input) {
    shared->size = input.size();
    std::copy(input.begin(), input.end(), shared->input);
    alarm(kSecondsOfAnInput);
    const uint64_t places = shared->places, edges = shared->edges;
    previous = 0;
    LLVMFuzzerTestOneInput(input.data(), input.size());
    ++shared->runs;
    if (shared->edges == edges) return;
    while (!input.empty() && input.back() == 0) input.pop_back();
    if (shared->places != places) smallest_.push_back(input);
    corpus_.push_back(std::move(input));
    shared->kept = corpus_.size();
  }

  Bytes changed() {
    Bytes input = pick();
    input.resize(std::clamp<size_t>(input.size() + below(64), 1, kMostBytes));
    // Some of several changes are of neighbours, which belong to one argument.
    size_t at = below(input.size());
    for (int64_t n = int64_t{1} << below(4); n > 0; --n) {
      at = below(3) == 0 ? below(input.size()) : std::min(at + below(3), input.size() - 1);
      change(input, at);
    }
    return input;
  }

  // The inputs that reach all code that was reached.
  const std::vector<Bytes> &smallest() const { return smallest_; }

 private:
  size_t below(size_t n) { return engine_() % n; }
  // Newer ones more often.
  const Bytes &pick() {
    const size_t count = corpus_.size();
    return corpus_[below(2) == 0 ? below(count) : count - 1 - below(std::min<size_t>(count, 16))];
  }

  void change(Bytes &input, size_t at) {
    uint8_t &byte = input[at];
    switch (below(6)) {
      case 0:
        byte = 0;
        return;
      case 1:
        byte = static_cast<uint8_t>(200 + below(56));
        return;
      case 2:
        byte ^= static_cast<uint8_t>(1 << below(8));
        return;
      case 3: {  // a part of another input, in its place
        const Bytes &other = pick();
        const size_t shorter = std::min(input.size(), other.size());
        if (shorter == 0) return;
        const size_t begin = below(shorter), end = begin + below(shorter - begin) + 1;
        std::copy(other.begin() + begin, other.begin() + end, input.begin() + begin);
        return;
      }
      default:
        byte = static_cast<uint8_t>(below(256));
        return;
    }
  }

  std::mt19937_64 engine_;
  std::vector<Bytes> corpus_, smallest_;
};

int fuzz(const Options &options) {
  if (!options.input.empty()) {
    alarm(kSecondsOfAnInput);
    std::ifstream file(options.input, std::ios::binary);
    const Bytes input((std::istreambuf_iterator<char>(file)), {});
    return LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  Fuzzer fuzzer(options.seed);
  for (int first = 0; first < 256; ++first) fuzzer.run({static_cast<uint8_t>(first)});
  for (const Bytes &input : read_corpus(options.corpus)) fuzzer.run(input);
  while (shared->runs < options.runs) fuzzer.run(fuzzer.changed());
  if (!options.keep.empty()) write_corpus(options.keep, fuzzer.smallest());
  return 0;
}

void write_report(const Options &options, bool finding) {
  std::FILE *const file = options.report.empty() ? stdout : std::fopen(options.report.c_str(), "w");
  if (file == nullptr) return;
  std::fprintf(file,
               "{\"runs\": %llu, \"calls\": %llu, \"refused\": %llu, \"places\": %llu, \"edges\": "
               "%llu, \"kept\": %llu, "
               "\"findings\": %d}\n",
               static_cast<unsigned long long>(shared->runs),
               static_cast<unsigned long long>(shared->calls),
               static_cast<unsigned long long>(shared->refused),
               static_cast<unsigned long long>(shared->places),
               static_cast<unsigned long long>(shared->edges),
               static_cast<unsigned long long>(shared->kept), finding);
  if (file != stdout) std::fclose(file);
}

}  // namespace

// Addresses as of the program, which the system puts elsewhere each time: a seed gives one run.
extern "C" void __sanitizer_cov_trace_pc() {
  const uintptr_t here = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) -
                         reinterpret_cast<uintptr_t>(__sanitizer_cov_trace_pc);
  static bool places[kEdges], edges[kEdges];
  const auto count = [](bool &reached, uint64_t &number) {
    number += !reached;
    reached = true;
  };
  count(places[here % kEdges], shared->places);
  count(edges[(here ^ previous << 5) % kEdges], shared->edges);
  previous = here;
}

void nf4::fuzz::count_call(bool refused) {
  ++shared->calls;
  shared->refused += refused;
}

int main(int count, char **words) {
  const Options options = parse(count, words);
  void *const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  shared = new (memory) Shared();
  const pid_t child = fork();
  if (child == 0) _exit(fuzz(options));
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child) return 2;
  write_report(options, status != 0);
  if (status == 0) return 0;
  const std::string path = options.report.empty() ? "finding" : options.report + ".finding";
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char *>(shared->input), static_cast<long>(shared->size));
  std::fprintf(stderr, "run %llu ended with status %d; its input is in %s\n",
               static_cast<unsigned long long>(shared->runs), status, path.c_str());
  return 1;
}
