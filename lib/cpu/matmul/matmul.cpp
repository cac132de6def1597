// Chooses between the ways to multiply, and holds the code that they share.
#include "cpu/matmul/matmul.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/formats.hpp"
#include "core/int4.hpp"
#include "cpu/dtypes.hpp"
#include "cpu/matmul/parts.hpp"
#include "cpu/weight/int4.hpp"
#include "cpu/weight/scales.hpp"

namespace nf4::cpu {
namespace {

constexpr int64_t kMaxStepBytes = 128 * sizeof(float);
// With fewer rows of x, decoding to integers takes longer than fp32 saves.
constexpr int64_t kMinPairsM = 5;

// Tells whether zero times the number is zero: neither padding nor bf16 can turn such a number into
// one for which it is not.
bool is_ordinary(float x) { return x == 0 || (std::fabs(x) > 0x1p-60f && std::fabs(x) < 0x1p60f); }

bool suits_look_up(const MatmulProblem &problem) {
  const float *entries = codebook(problem.weight);
  return problem.weight.cols % kKernelStep == 0 && problem.weight.blocksize() >= kKernelStep &&
         std::all_of(entries, entries + kCodebookSize, is_ordinary);
}

// Multiplies rows of codes by dot, lanes or transposed, and tells whether these kernels have one
// for so many rows of x. transposed leaves the last rows to dot where they are too few for a slice.
template <class Dot, class Lanes, class Transposed>
bool multiply_codes(const MatmulKernels &kernels, RowRange m, const Dot &dot, const Lanes &lanes,
                    const Transposed &transposed) {
  constexpr int64_t kMaxRestM = 6;
  const int64_t count = m.end - m.begin;
  if (count <= kernels.max_dot_m) {
    dot(m);
  } else if (kernels.lanes != nullptr) {
    lanes();
  } else if (kernels.transpose_x != nullptr) {
    const int64_t rest = count % kSliceM <= kMaxRestM ? count % kSliceM : 0;
    transposed(RowRange{m.begin, m.end - rest});
    if (rest > 0) dot(RowRange{m.end - rest, m.end});
  } else {
    return false;
  }
  return true;
}

// Calls multiply(rows) for groups of alike numbers of rows of x, up to the first for which it
// returns false, and tells whether there is none.
template <class Multiply>
bool in_groups(int64_t m, const Multiply &multiply) {
  const int64_t groups = ceil_divide(m, kMaxPairsM);
  for (int64_t i = 0; i < groups; ++i)
    if (!multiply(RowRange{m * i / groups, m * (i + 1) / groups})) return false;
  return true;
}

// multiply_codes, or pairs where the kernels have them. `pairs` returns false for rows of x that do
// not suit it.
template <class Dot, class Lanes, class Transposed, class Pairs>
bool multiply_codes(const MatmulKernels &kernels, int64_t m, const Dot &dot, const Lanes &lanes,
                    const Transposed &transposed, const Pairs &pairs) {
  if (kernels.int4_dot.multiply_pairs == nullptr || m < kMinPairsM)
    return multiply_codes(kernels, RowRange{0, m}, dot, lanes, transposed);
  return in_groups(m, [&](RowRange group) {
    return pairs(group) || multiply_codes(kernels, group, dot, lanes, transposed);
  });
}

bool suits_word_pairs(const MatmulKernels &kernels, const Int4MatmulProblem &problem) {
  const Int4Weight &weight = problem.weight;
  return kernels.int4_dot.multiply_pairs != nullptr && problem.m >= kMinPairsM &&
         weight.g_idx == nullptr && weight.cols % kInt4PerWord == 0 &&
         (weight.groups == 1 || weight.group_size % kMinBlocksize == 0);
}

// Multiplies words by pairs, some rows of x at a time, and tells whether all rows of x suit it.
bool multiply_word_pairs(const MatmulSet &set, const MatmulKernels &kernels,
                         const Int4MatmulProblem &problem, RowRange n) {
  return suits_word_pairs(kernels, problem) && in_groups(problem.m, [&](RowRange group) {
           return matmul_word_pairs(set.dequant, kernels, problem, n, group);
         });
}

}  // namespace

const MatmulKernels &kernels_for(const MatmulSet &set, nf4_dtype dtype) {
  return set.bf16 != nullptr && dtype == NF4_DTYPE_BF16 ? *set.bf16 : set.fp32;
}

const void *int4_codebook(int dtype) {
  static constexpr uint16_t kBf16[] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                       0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040,
                                       0x4080, 0x40a0, 0x40c0, 0x40e0};
  if (dtype == NF4_DTYPE_BF16) return kBf16;
  return kInt4Codebook;
}

void PaddedConversion::operator()(const char *x, int64_t elements, char *out) const {
  const int64_t whole = elements - elements % step;
  convert(x, whole, out);
  if (whole == elements) return;
  char padded[kMaxStepBytes] = {};
  std::memcpy(padded, x + whole * bytes_in, (elements - whole) * bytes_in);
  convert(padded, step, out + whole * bytes_out);
}

template <class Problem>
void store_sums(const Problem &problem, const Sums &sums) {
  with_dtype(problem.dtype, [&](auto type) {
    using T = decltype(type);
    const T *bias = static_cast<const T *>(problem.bias);
    const float *values = sums.values - sums.n.begin;
    for (int64_t m = sums.m.begin; m < sums.m.end; ++m) {
      T *y = static_cast<T *>(problem.y) + m * problem.y_stride;
      const bool has_x = problem.group->has_x(m);
      const float scale = problem.group->row_scale == nullptr ? 1 : problem.group->row_scale[m];
      for (int64_t n = sums.n.begin; n < sums.n.end; ++n) {
        const float sum = has_x ? values[n] : 0;
        y[n] = from_float<T>(scale * (bias == nullptr ? sum : sum + to_float(bias[n])));
      }
      values += sums.stride;
    }
  });
}

template void store_sums(const MatmulProblem &problem, const Sums &sums);
template void store_sums(const Int4MatmulProblem &problem, const Sums &sums);
template void store_sums(const DenseProblem &problem, const Sums &sums);

RoundedCodebook bf16_codebook_for(const MatmulProblem &problem) {
  const bool used = problem.dtype == NF4_DTYPE_BF16 && suits_look_up(problem);
  return used ? codebook_in_bf16(problem.weight) : RoundedCodebook{};
}

void matmul_vector(const MatmulSet &set, const MatmulProblem &problem,
                   const RoundedCodebook &bf16_codebook, RowRange n) {
  const MatmulKernels &kernels = kernels_for(set, problem.dtype);
  const bool done =
      suits_look_up(problem) &&
      multiply_codes(
          kernels, problem.m,
          [&](RowRange m) { matmul_dot(kernels, problem, bf16_codebook, n, m); },
          [&] { matmul_lanes(kernels, problem, bf16_codebook, n); },
          [&](RowRange m) { matmul_transposed(kernels, problem, bf16_codebook, n, m); },
          [&](RowRange m) { return matmul_pairs(kernels, problem, bf16_codebook, n, m); });
  if (!done) matmul_panel(set.dequant, kernels, problem, n);
}

void int4_matmul_vector(const MatmulSet &set, const Int4MatmulProblem &problem, RowRange n) {
  const MatmulKernels &kernels = kernels_for(set, problem.dtype);
  const Int4Weight &weight = problem.weight;
  const bool in_rows = weight.layout == NF4_INT4_COMPRESSED_TENSORS;
  const bool whole_steps = weight.group_size % kKernelStep == 0;
  const bool for_panel = (whole_steps || weight.groups == 1) && weight.g_idx == nullptr;
  if (weight.cols == 0) return matmul_panel(set.dequant, kernels, problem, n);
  if (suits_scattered_columns(problem))
    return matmul_scattered_columns(set.dequant, kernels, problem, n);
  if (weight.g_idx != nullptr || (in_rows && !for_panel))
    return matmul_sorted_columns(set.dequant, kernels, problem, n);
  if (in_rows && whole_steps &&
      multiply_codes(
          kernels, problem.m, [&](RowRange m) { matmul_dot(set.dequant, kernels, problem, n, m); },
          [&] { matmul_lanes(set.dequant, kernels, problem, n); },
          [&](RowRange m) { matmul_transposed(set.dequant, kernels, problem, n, m); },
          [&](RowRange m) { return matmul_pairs(set.dequant, kernels, problem, n, m); }))
    return;
  if (!in_rows && multiply_word_pairs(set, kernels, problem, n)) return;
  if (!in_rows && weight.group_size % kInt4PerWord == 0 &&
      (problem.m <= kernels.max_columns_m || !for_panel))
    return matmul_columns(set.dequant, kernels, problem, n);
  matmul_panel(set.dequant, kernels, problem, n);
}

}  // namespace nf4::cpu
