// A Mixtral-shaped block of experts in host memory, for host_moe.cpp and moe_block.cu. Each of 8
// experts computes y = down(silu(gate(x)) * up(x)). A router chooses 2 experts for each token, and
// the block adds their outputs. Gate and up of all experts are one 4-bit weight, down is another.
#pragma once

#include <algorithm>
#include <cmath>

#include "host_weight.hpp"

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

constexpr int64_t kHidden = 256, kIntermediate = 896;
constexpr int kExperts = 8, kTopK = 2;

HOST_DEVICE inline float swiglu(float gate, float up) { return gate / (1 + expf(-gate)) * up; }

// The two experts of the largest logits, and the softmax of these.
struct Choice {
  int expert[kTopK];
  float weight[kTopK];
};

HOST_DEVICE inline Choice choose(const float *logits) {
  int first = 0;
  for (int e = 1; e < kExperts; ++e)
    if (logits[e] > logits[first]) first = e;
  int second = first == 0 ? 1 : 0;
  for (int e = second + 1; e < kExperts; ++e)
    if (e != first && logits[e] > logits[second]) second = e;
  const float share = 1 / (1 + expf(logits[second] - logits[first]));
  return {{first, second}, {share, 1 - share}};
}

// The routing as libnf4 takes it: rows of y sorted by expert, two for each token.
struct Routing {
  std::vector<int32_t> ends, x_index, place;  // place: the row of y of each token's choice
  std::vector<float> row_scale;
};

// m rows of y; x_index and row_scale may be added.
inline nf4_grouped_args experts_product(const nf4_tensor &weight, nf4_dtype dtype, const void *x,
                                        int64_t x_rows, void *y, int64_t m, const int32_t *ends) {
  nf4_grouped_args args{};
  args.struct_size = sizeof args;
  args.dtype = dtype;
  args.experts = kExperts;
  args.m = m;
  args.x = x;
  args.x_stride = weight.cols;
  args.x_rows = x_rows;
  args.y = y;
  args.y_stride = weight.rows / kExperts;
  args.ends = ends;
  return args;
}

struct HostMoe {
  std::vector<float> router = random_numbers(kExperts * kHidden, 0.1f, 1);  // [experts, hidden]
  HostWeight gate_up{random_numbers(kExperts * 2 * kIntermediate * kHidden, 0.05f, 2),
                     kExperts * 2 * kIntermediate, kHidden};
  HostWeight down{random_numbers(kExperts * kHidden * kIntermediate, 0.05f, 3), kExperts * kHidden,
                  kIntermediate};

  Choice chosen(const float *x) const {
    float logits[kExperts] = {};
    for (int e = 0; e < kExperts; ++e)
      for (int64_t k = 0; k < kHidden; ++k) logits[e] += router[e * kHidden + k] * x[k];
    return choose(logits);
  }

  Routing route(const std::vector<float> &x) const {
    const size_t tokens = x.size() / kHidden;
    std::vector<Choice> choices;
    for (size_t t = 0; t < tokens; ++t) choices.push_back(chosen(&x[t * kHidden]));
    Routing made;
    made.place.resize(tokens * kTopK);
    for (int e = 0; e < kExperts; ++e) {
      for (size_t pair = 0; pair < tokens * kTopK; ++pair) {
        const Choice &choice = choices[pair / kTopK];
        if (choice.expert[pair % kTopK] != e) continue;
        made.place[pair] = static_cast<int32_t>(made.x_index.size());
        made.x_index.push_back(static_cast<int32_t>(pair / kTopK));
        made.row_scale.push_back(choice.weight[pair % kTopK]);
      }
      made.ends.push_back(static_cast<int32_t>(made.x_index.size()));
    }
    return made;
  }

  // x and the result: [tokens, hidden].
  std::vector<float> operator()(const std::vector<float> &x) const {
    const int64_t tokens = static_cast<int64_t>(x.size()) / kHidden, m = tokens * kTopK;
    const Routing routing = route(x);
    std::vector<float> both(m * 2 * kIntermediate), hidden(m * kIntermediate), rows(m * kHidden);
    nf4_grouped_args args = experts_product(gate_up.tensor, NF4_DTYPE_FP32, x.data(), tokens,
                                            both.data(), m, routing.ends.data());
    args.x_index = routing.x_index.data();
    check(nf4_matmul_grouped_cpu(&gate_up.tensor, &args, 0));
    for (int64_t i = 0; i < m * kIntermediate; ++i) {
      const float *row = &both[i / kIntermediate * 2 * kIntermediate];
      hidden[i] = swiglu(row[i % kIntermediate], row[kIntermediate + i % kIntermediate]);
    }
    args = experts_product(down.tensor, NF4_DTYPE_FP32, hidden.data(), m, rows.data(), m,
                           routing.ends.data());
    args.row_scale = routing.row_scale.data();
    check(nf4_matmul_grouped_cpu(&down.tensor, &args, 0));
    std::vector<float> y(x.size());
    for (size_t i = 0; i < y.size(); ++i)
      for (int choice = 0; choice < kTopK; ++choice)
        y[i] += rows[routing.place[i / kHidden * kTopK + choice] * kHidden + i % kHidden];
    return y;
  }
};

// ||got - expected|| / ||expected||
template <class Number>
double relative_error(const std::vector<float> &got, const std::vector<Number> &expected) {
  double off = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    off += std::pow(got[i] - double(expected[i]), 2);
    size += std::pow(double(expected[i]), 2);
  }
  return std::sqrt(off / size);
}
