// Computes a Mixtral-shaped block of experts on the CPU with two grouped products; the weights stay
// in 4 bits. Compares with a loop over tokens and their experts on the dequantized weights, in
// binary64.
//
//   eval "c++ -std=c++17 host_moe.cpp $(pkg-config --cflags --libs nf4)"
#include <cstdio>

#include "moe.hpp"

namespace {

constexpr int64_t kTokens = 12;
constexpr double kAllowed = 1e-5;

std::vector<float> dequantized(const nf4_tensor &weight) {
  std::vector<float> dense(weight.rows * weight.cols);
  check(nf4_dequant_cpu(&weight, dense.data(), NF4_DTYPE_FP32, 0));
  return dense;
}

double dot(const float *row, const double *x, int64_t count) {
  double sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += row[k] * x[k];
  return sum;
}

std::vector<double> expected(const HostMoe &moe, const std::vector<float> &x) {
  const std::vector<float> gate_up = dequantized(moe.gate_up.tensor);
  const std::vector<float> down = dequantized(moe.down.tensor);
  std::vector<double> y(x.size()), hidden(kIntermediate);
  for (int64_t token = 0; token < kTokens; ++token) {
    const std::vector<double> of_token(&x[token * kHidden], &x[token * kHidden] + kHidden);
    const Choice choice = moe.chosen(&x[token * kHidden]);
    for (int i = 0; i < kTopK; ++i) {
      const float *gate = &gate_up[choice.expert[i] * 2 * kIntermediate * kHidden];
      const float *up = gate + kIntermediate * kHidden;
      for (int64_t n = 0; n < kIntermediate; ++n) {
        const double sum = dot(gate + n * kHidden, of_token.data(), kHidden);
        hidden[n] = sum / (1 + std::exp(-sum)) * dot(up + n * kHidden, of_token.data(), kHidden);
      }
      const float *of_expert = &down[choice.expert[i] * kHidden * kIntermediate];
      for (int64_t n = 0; n < kHidden; ++n)
        y[token * kHidden + n] +=
            choice.weight[i] * dot(of_expert + n * kIntermediate, hidden.data(), kIntermediate);
    }
  }
  return y;
}

int run() {
  const HostMoe moe;
  const std::vector<float> x = random_numbers(kTokens * kHidden, 1.0f, 4);
  const double error = relative_error(moe(x), expected(moe, x));
  std::printf("%lld tokens: off by %.1e, %.1e allowed\n", static_cast<long long>(kTokens), error,
              kAllowed);
  return error <= kAllowed ? 0 : 1;  // false for NaN, too
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
