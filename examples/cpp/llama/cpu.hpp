// The model on the CPU, in fp32: libnf4's products, and teams of one thread for the rest.
#pragma once

#include <future>
#include <thread>

#include "model.hpp"

class Cpu {
 public:
  struct Team {
    static constexpr int rank = 0, size = 1;
    float sum(float value) const { return value; }
    float max(float value) const { return value; }
    void sync() const {}
    float *memory(size_t count) const {
      thread_local std::vector<float> memory(count);
      return memory.data();
    }
  };
  using Thread = Team;
  using Warp = Team;
  using Block = Team;
  using T = float;
  static constexpr const char *kName = "cpu";
  static constexpr bool kReadsHost = true;

  explicit Cpu(int64_t threads)
      : threads_(threads ? threads : std::max(1u, std::thread::hardware_concurrency())) {}

  // NULL where there is not as much in all: malloc promises more than there is.
  void *allocate(size_t bytes) {
    taken_ += bytes;
    const size_t all = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    return memory_.emplace_back(taken_ < all ? std::malloc(bytes) : nullptr, std::free).get();
  }
  void copy(void *to, const void *from, size_t bytes) { std::memcpy(to, from, bytes); }
  void multiply(const nf4::Products &products) { products.cpu(static_cast<int32_t>(threads_)); }
  // Calls a method for 0, 1, ..., count - 1, on as many threads as pay for their start.
  template <auto kMethod, class... Arguments>
  void run(int64_t count, int64_t cost, Step<Cpu> step, Arguments... arguments) {
    const int64_t parts = std::clamp<int64_t>(count * cost >> 18, 1, threads_);
    const auto part = [&](int64_t i) {
      for (int64_t j = count * i / parts; j < count * (i + 1) / parts; ++j)
        (step.*kMethod)(Team{}, static_cast<int>(j), arguments...);
    };
    std::vector<std::future<void>> others;
    for (int64_t i = 1; i < parts; ++i) others.push_back(std::async(std::launch::async, part, i));
    part(0);
    for (std::future<void> &other : others) other.get();
  }
  template <class Function>
  void repeat(const Function &step) {
    step();
  }

 private:
  int64_t threads_;
  size_t taken_ = 0;  // bytes
  std::vector<std::unique_ptr<void, void (*)(void *)>> memory_;
};
