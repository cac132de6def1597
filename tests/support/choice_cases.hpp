// Random products and GPUs for which the choice of matmul's kernel is on record.
#pragma once

#include <cstdint>

#include "problem.hpp"

namespace nf4::test {

constexpr int kChoiceCases = 5000;

struct ChoiceGpu {
  int compute_capability;
  int multiprocessors;
  int shared_bytes;
  int resident_clusters[9];  // indexed by cluster size
};

// Hopper GPUs: H200, H100 PCIe, H20; then an A100, an RTX 3090, an L4, a T4 and a B200.
constexpr ChoiceGpu kChoiceGpus[] = {
    {90, 132, 232448, {0, 0, 66, 43, 32, 25, 21, 17, 15}},
    {90, 132, 232448, {0, 0, 66, 42, 33, 24, 20, 16, 14}},
    {90, 114, 232448, {0, 0, 57, 36, 28, 21, 18, 15, 13}},
    {90, 78, 232448, {0, 0, 39, 24, 19, 15, 12, 10, 9}},
    {80, 108, 166912, {}},
    {86, 82, 101376, {}},
    {89, 58, 101376, {}},
    {75, 40, 65536, {}},
    {100, 148, 232448, {}},
};

class ChoiceCases {
 public:
  struct Case {
    MatmulProblem problem;
    const ChoiceGpu *gpu;
  };

  // Pointers are only numbers: nothing is read through them.
  Case next() {
    // Every second GPU is a Hopper, for which there are most choices.
    const ChoiceGpu *gpu = kChoiceGpus + (next_below(2) ? next_below(4) : next_below(9));
    MatmulProblem problem{};
    Weight &weight = problem.weight;
    weight.format = next_below(2) ? NF4_FORMAT_NF4 : NF4_FORMAT_FP4;
    weight.rows = next_size();
    weight.cols = next_size();
    if (next_below(50) == 0) weight.rows = 1 + next_below(uint64_t{1} << 31);
    if (next_below(50) == 0) weight.cols = 64 * (1 + next_below(uint64_t{1} << 17));
    weight.elements = weight.rows * weight.cols;
    weight.blocksize_log2 = next_below(4) ? 6 : 5 + static_cast<int>(next_below(8));
    weight.nested_blocksize_log2 = next_below(3) == 0 ? -1
                                   : next_below(4)    ? 8
                                                      : static_cast<int>(next_below(30));
    weight.blocks = ceil_divide(weight.elements, weight.blocksize());
    weight.nested_blocks =
        weight.nested() ? ceil_divide(weight.blocks, weight.nested_blocksize()) : 0;
    weight.packed = at<uint8_t>(next_address(16));
    weight.absmax = at<void>(next_address(16));
    if (weight.nested()) weight.nested_absmax = at<float>(next_address(16));
    if (next_below(8) == 0) weight.codebook = at<const float>(next_address(16));
    problem.dtype = next_below(2) ? NF4_DTYPE_BF16 : NF4_DTYPE_FP16;
    problem.m = next_m();
    problem.x = at<const void>(next_address(16));
    problem.x_stride = weight.cols + (next_below(8) ? 0 : next_below(64));
    problem.y = at<void>(next_address(16));
    problem.y_stride = weight.rows;
    return {problem, gpu};
  }

 private:
  uint64_t next_bits() {  // splitmix64
    uint64_t bits = state_ += 0x9e3779b97f4a7c15;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    return bits ^ bits >> 31;
  }
  int64_t next_below(uint64_t end) { return static_cast<int64_t>(next_bits() % end); }

  int64_t next_m() {
    constexpr int64_t kUpTo[] = {4, 20, 100, 400, 2000, 10000, 100000};
    return 1 + next_below(kUpTo[next_below(7)]);
  }
  // Sizes of models' weights, multiples of 64 or of 8, and any size.
  int64_t next_size() {
    constexpr int64_t kModels[] = {512,  1024, 2048,  3072,  4096,  5120,  6144,
                                   8192, 9216, 11008, 14336, 25600, 28672, 53248};
    switch (next_below(8)) {
      case 0:
        return 1 + next_below(20000);
      case 1:
        return 8 * (1 + next_below(2000));
      case 2:
      case 3:
        return 64 * (1 + next_below(512));
      default:
        return kModels[next_below(14)];
    }
  }
  // Addresses are aligned, except for one in sixteen.
  uintptr_t next_address(uintptr_t alignment) {
    const uintptr_t base = 0x7f0000000000 + alignment * static_cast<uintptr_t>(next_below(1 << 20));
    return next_below(16) ? base : base + alignment / 4;
  }
  template <class T>
  static T *at(uintptr_t address) {
    return reinterpret_cast<T *>(address);
  }

  uint64_t state_ = 20;
};

}  // namespace nf4::test
