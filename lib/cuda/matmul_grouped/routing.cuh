// Finds on the device which rows of y belong to which expert, since the host does not know the
// ends.
//
// Each expert's rows are cut into chunks of up to kChunkRows, which are numbered expert after
// expert. A warp knows all of them together: a lane has experts / 32 neighbouring experts. Ends are
// clamped to the rows of y, and an end below an earlier one is replaced by that one: such an expert
// has no rows.
#pragma once

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/matmul_grouped/args.hpp"

namespace nf4::cuda {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;

struct RowChunk {
  int expert;
  int first_row;  // a row of y
  int rows;
};

// All lanes of a warp call each of its functions.
template <int kChunkRows>
class Routing {
 public:
  __device__ __forceinline__ explicit Routing(const Groups &groups) : groups_(groups) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    int last = 0;
#pragma unroll 4
    for (int expert = first_expert(); expert < end_expert(); ++expert)
      last = max(last, min(groups.ends[expert], groups.rows));
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, last, distance);
      if (lane >= distance) last = max(last, before);
    }
    first_row_ = __shfl_up_sync(kAllLanes, last, 1);
    if (lane == 0) first_row_ = 0;
    int chunks = 0;
    for_each_expert([&](int, int, int rows) { chunks += chunks_of(rows); });
    end_chunk_ = chunks;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end_chunk_, distance);
      if (lane >= distance) end_chunk_ += before;
    }
    first_chunk_ = end_chunk_ - chunks;
  }

  __device__ __forceinline__ int chunks() const { return __shfl_sync(kAllLanes, end_chunk_, 31); }

  // `index` is the same in all lanes and less than chunks().
  __device__ __forceinline__ RowChunk at(int index) const {
    const bool has = (first_chunk_ <= index) & (index < end_chunk_);
    const int lane = __ffs(static_cast<int>(__ballot_sync(kAllLanes, has))) - 1;
    RowChunk found{};
    if (has) {
      int first = first_chunk_;
      for_each_expert([&](int expert, int row, int rows) {
        const int chunks = chunks_of(rows);
        if (index >= first && index - first < chunks) {
          const int skipped = (index - first) * kChunkRows;
          found = {expert, row + skipped, min(rows - skipped, kChunkRows)};
        }
        first += chunks;
      });
    }
    return {__shfl_sync(kAllLanes, found.expert, lane),
            __shfl_sync(kAllLanes, found.first_row, lane),
            __shfl_sync(kAllLanes, found.rows, lane)};
  }

 private:
  // Accepts numbers up to 2^31 - 1.
  static __device__ __forceinline__ int divide_up(int a, int b) { return a / b + (a % b != 0); }
  static __device__ __forceinline__ int chunks_of(int rows) { return divide_up(rows, kChunkRows); }
  __device__ __forceinline__ int per_lane() const { return divide_up(groups_.experts, 32); }
  __device__ __forceinline__ int first_expert() const {
    return static_cast<int>(threadIdx.x % 32) * per_lane();
  }
  __device__ __forceinline__ int end_expert() const {
    return first_expert() + min(per_lane(), groups_.experts - first_expert());
  }
  // Calls visit(expert, its first row, its number of rows) for this lane's experts.
  template <class Visit>
  __device__ __forceinline__ void for_each_expert(Visit visit) const {
    int row = first_row_;
#pragma unroll 4
    for (int expert = first_expert(); expert < end_expert(); ++expert) {
      const int end = max(row, min(groups_.ends[expert], groups_.rows));
      visit(expert, row, end - row);
      row = end;
    }
  }

  const Groups &groups_;
  int first_row_;  // a row of y: the first of this lane's first expert
  int first_chunk_, end_chunk_;
};

// Returns the row of x for a row of y, or `x_rows` if there is none.
__device__ __forceinline__ int64_t x_row_of(const Groups &groups, int64_t x_rows, int row) {
  if (groups.x_index == nullptr) return row < x_rows ? row : x_rows;
  const int index = groups.x_index[row];
  return index >= 0 && index < x_rows ? index : x_rows;
}

// Adds an expert's bias to a sum and applies the row's scale.
template <class T, class Args>
__device__ __forceinline__ float finish_output(const Args &matmul, const Groups &groups, int expert,
                                               int row, int64_t n, float sum) {
  if (matmul.bias != nullptr)
    sum += to_float(static_cast<const T *>(matmul.bias)[expert * groups.bias_stride + n]);
  return groups.row_scale == nullptr ? sum : sum * groups.row_scale[row];
}

}  // namespace
}  // namespace nf4::cuda
