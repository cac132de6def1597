// Matmul for few rows of x: the codes go from memory to the sums.
//
// x is prepared once for a chunk of the weight's rows, in the order in which the kernels meet the
// codes, so that these need no sorting: what remains per weight is in the kernels. The scales of a
// row are read here: 0.4 of the 1.6 ns that 64 weights at blocksize 64 take for one row of x on a
// Zen 4 (avx512bf16.cpp). docs/design/cpu.md has what was tried.
#include <algorithm>
#include <cstring>

#include "core/formats.hpp"
#include "cpu/matmul/parts.hpp"
#include "cpu/weight/scales.hpp"

namespace nf4::cpu {
namespace {

// Rows of the weight whose sums are kept at once, and those that a kernel gets at once.
constexpr int64_t kBlockN = 64;
constexpr int64_t kKernelN = 4;
// Of prepared x: as much as the L1 cache holds; codes are prefetched into the L2 cache.
constexpr int64_t kPreparedBytes = 32768;
constexpr int64_t kMaxUnit = 128;
constexpr int64_t kMaxScales = kPreparedBytes / 2 / kMinBlocksize + kScalePadding;

class DotMultiplier {
 public:
  DotMultiplier(const MatmulKernels &kernels, const MatmulProblem &problem,
                const RoundedCodebook &bf16_codebook)
      : kernels_(kernels),
        problem_(problem),
        weight_(problem.weight),
        codebook_(codebook(problem.weight)),
        element_bytes_(element_bytes(kernels.dtype)),
        prepare_{kernels.prepare[problem.dtype - 1], kernels.unit, element_bytes(problem.dtype),
                 element_bytes_} {
    while (per_scale_ < kernels.unit && per_scale_ < weight_.blocksize() &&
           weight_.cols % (2 * per_scale_) == 0)
      per_scale_ *= 2;
    if (kernels.dtype == NF4_DTYPE_BF16) {
      codebook_ = bf16_codebook.entries;
      unit_ = bf16_codebook.unit;
    }
  }

  void operator()(RowRange n) {
    const int64_t groups = ceil_divide(problem_.m, kMaxDotM);
    for (int64_t i = n.begin; i < n.end; i += kBlockN)
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = problem_.m * group / groups;
        const int64_t last = problem_.m * (group + 1) / groups;
        multiply({i, std::min(n.end, i + kBlockN)}, first, static_cast<int>(last - first));
      }
  }

 private:
  void multiply(RowRange n, int64_t first_m, int m) {
    float sums[kBlockN * kMaxDotM] = {};
    const int64_t chunk = kPreparedBytes / element_bytes_ / m / kernels_.unit * kernels_.unit;
    for (int64_t k = 0; k < weight_.cols; k += chunk) {
      const int64_t elements = std::min(chunk, weight_.cols - k);
      prepare(first_m, m, k, elements);
      for (int64_t i = n.begin; i < n.end; i += kKernelN)
        add_products({i, std::min(n.end, i + kKernelN)}, m, k, elements, sums + (i - n.begin));
    }
    for (float &sum : sums) sum *= unit_;
    store_sums(problem_, {n, {first_m, first_m + m}, sums, kBlockN});
  }

  // Does nothing where that part of x is there from the block of rows before.
  void prepare(int64_t first_m, int m, int64_t k, int64_t elements) {
    if (prepared_m_ == first_m && prepared_k_ == k) return;
    prepared_m_ = first_m;
    prepared_k_ = k;
    x_stride_ = ceil_divide(elements, kernels_.unit) * kernels_.unit;
    for (int i = 0; i < m; ++i)
      prepare_(address_of_x(problem_, first_m + i, k), elements,
               x_ + i * x_stride_ * element_bytes_);
  }

  void add_products(RowRange n, int m, int64_t k, int64_t elements, float *sums) {
    const int count = static_cast<int>(n.end - n.begin);
    for (int i = 0; i < count; ++i)
      spread_scales((n.begin + i) * weight_.cols + k, elements, scales_ + i * kMaxScales);
    const int64_t row_bytes = weight_.cols / 2;
    const int64_t tail = elements % kernels_.unit;
    DotArgs args{codebook_,
                 weight_.packed + n.begin * row_bytes + k / 2,
                 row_bytes,
                 scales_,
                 kMaxScales,
                 static_cast<int>(kernels_.unit / per_scale_),
                 x_,
                 x_stride_,
                 elements - tail,
                 count,
                 m,
                 sums,
                 kBlockN};
    kernels_.dot(args);
    if (tail > 0) add_tail(args, tail);
  }

  // The rest of a row, which is less than a unit: through padded copies.
  void add_tail(DotArgs args, int64_t tail) {
    uint8_t packed[kKernelN][kMaxUnit / 2] = {};
    for (int i = 0; i < args.n; ++i)
      std::memcpy(packed[i], args.packed + i * args.row_bytes + args.elements / 2, tail / 2);
    args.packed = packed[0];
    args.row_bytes = kMaxUnit / 2;
    args.scales += args.elements / per_scale_;
    args.x = x_ + args.elements * element_bytes_;
    args.elements = kernels_.unit;
    kernels_.dot(args);
  }

  // One scale for each per_scale_ elements, and zeros after the last.
  void spread_scales(int64_t first_element, int64_t elements, float *out) const {
    const int64_t first = first_element >> weight_.blocksize_log2;
    const int64_t last = (first_element + elements - 1) >> weight_.blocksize_log2;
    const int64_t count = elements / per_scale_;
    if (per_scale_ == weight_.blocksize()) {
      read_scales(weight_, first, count, out);
    } else {
      float by_block[kMaxScales];
      read_scales(weight_, first, last - first + 1, by_block);
      for (int64_t i = 0; i < count; ++i)
        out[i] = by_block[((first_element + i * per_scale_) >> weight_.blocksize_log2) - first];
    }
    std::fill_n(out + count, kMaxUnit / kMinBlocksize, 0.0f);
  }

  const MatmulKernels &kernels_;
  const MatmulProblem &problem_;
  const Weight &weight_;
  const void *codebook_;         // in the kernels' dtype
  float unit_ = 1;               // of its numbers
  const int64_t element_bytes_;  // of prepared x
  const PaddedConversion prepare_;
  int64_t per_scale_ = kMinBlocksize;  // elements, of which a unit and every row have whole ones
  int64_t prepared_m_ = -1;
  int64_t prepared_k_ = -1;
  int64_t x_stride_ = 0;
  float scales_[kKernelN * kMaxScales] = {};
  alignas(64) char x_[kPreparedBytes];
};

}  // namespace

void matmul_dot(const MatmulKernels &kernels, const MatmulProblem &problem,
                const RoundedCodebook &bf16_codebook, RowRange n) {
  DotMultiplier(kernels, problem, bf16_codebook)(n);
}

}  // namespace nf4::cpu
