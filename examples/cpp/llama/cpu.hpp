// The model on the CPU, in fp32: libnf4's products, and teams of one thread for the rest.
#pragma once

#include <future>
#include <memory>
#include <thread>

#include "model.hpp"

class Cpu {
 public:
  struct Team {
    static constexpr int rank = 0, size = 1;
    float *memory;
    float sum(float value) const { return value; }
    float max(float value) const { return value; }
    void sync() const {}
  };
  using Thread = Team;
  using Warp = Team;
  using Block = Team;
  using T = float;
  static constexpr const char *kName = "cpu";
  static constexpr bool kReadsHost = true;

  explicit Cpu(int64_t threads)
      : threads_(threads ? threads : std::max(1u, std::thread::hardware_concurrency())) {}

  template <class U>
  U *allocate(size_t count, const std::string &what) {
    const double all = double(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    taken_ += double(count) * sizeof(U);  // in all: malloc promises more than there is
    void *memory = taken_ < all ? std::malloc(count * sizeof(U)) : nullptr;
    require(memory, "too little memory: ", what, " takes ", double(count) * sizeof(U) / 1e9, " GB");
    memory_.emplace_back(memory, std::free);
    return static_cast<U *>(memory);
  }
  void copy(void *to, const void *from, size_t bytes) { std::memcpy(to, from, bytes); }
  void multiply(const Products &of) {
    const auto threads = static_cast<int32_t>(threads_);
    check(nf4_matmul_batch_cpu(of.nf4.data(), of.nf4_args.data(), of.nf4.size(), threads));
    check(nf4_int4_matmul_batch_cpu(of.int4.data(), of.int4_args.data(), of.int4.size(), threads));
  }
  void prepare(const Step<Cpu> &) {}
  // Calls a method for 0, 1, ..., count - 1, on as many threads as pay for their start.
  template <auto kMethod, class... Arguments>
  void run(int64_t count, int64_t cost, Step<Cpu> step, Arguments... arguments) {
    const int64_t parts = std::clamp<int64_t>(count * cost >> 18, 1, threads_);
    const auto part = [&](int64_t i) {
      const std::unique_ptr<float[]> memory(new float[int64_t{step.context} + step.dim]);
      for (int64_t j = count * i / parts; j < count * (i + 1) / parts; ++j)
        (step.*kMethod)(Team{memory.get()}, static_cast<int>(j), arguments...);
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
  double taken_ = 0;  // bytes
  std::vector<std::unique_ptr<void, void (*)(void *)>> memory_;
};
