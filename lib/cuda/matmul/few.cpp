#include "cuda/matmul/few.hpp"

#include <algorithm>
#include <climits>

#include "core/formats.hpp"
#include "core/rounding.hpp"
#include "cuda/matmul/deal.hpp"
#include "cuda/matmul/few_args.hpp"

namespace nf4::cuda {
namespace {

int64_t thread_blocks(int64_t rows, const Device &device) {
  return std::min<int64_t>(rows, device.multiprocessors);
}

// Odd, for which the scales of 8 rows are in different banks.
int64_t scale_pitch(int64_t slices) { return slices | 1; }

// Bytes of shared memory: of the scales' code, and of what a tile has beside partial sums.
struct ScaleRoom {
  int64_t code;
  int64_t nested;
  int64_t items;
};
ScaleRoom scale_room(int64_t cols, bool nested, int elements_log2) {
  const int64_t slices = ceil_divide(cols, kSlice);
  return {nested ? kScaleCodeSize * kScaleCodeCopies * 4 : 0,
          nested ? 4 * ceil_divide(kTileRows * cols, int64_t{1} << elements_log2) : 0,
          kTileRows * scale_pitch(slices) * (nested ? 4 : 16)};
}

// Tiles of a group, whose sums and scales fit; 0 if not even one does.
int64_t tiles_that_fit(const FewLayout &layout, const ScaleRoom &room, const Device &device) {
  // An entry of nested_absmax more than the tiles' own, and what aligning takes.
  constexpr int64_t kSlack = 4 + 16;
  const int64_t bytes = device.shared_bytes - layout.partials - room.code - kSlack;
  return bytes / (layout.tile_partials + room.nested + room.items);
}

// What L2 is asked for of a thread block's rows before the kernel's own copies, which wait for its
// first small loads. More delays those; where a share is large there is no use.
int prefetch_bytes(int64_t share_bytes) {
  constexpr int64_t kLargeShare = 512 << 10, kAhead = 32 << 10;
  return share_bytes > kLargeShare ? 0 : static_cast<int>(std::min(share_bytes, kAhead) / 16 * 16);
}

// Groups of equal size, so that none is nearly empty.
int even_groups(int64_t tiles, int64_t most) {
  return static_cast<int>(ceil_divide(tiles, ceil_divide(tiles, std::min(tiles, most))));
}

// Fills in how so many thread blocks share the work; returns the bytes of shared memory.
int share_work(const FewLayout &layout, int64_t blocks, const Device &device, FewArgs &few) {
  const MatmulArgs &args = few.matmul;
  const bool nested = args.nested_absmax != nullptr;
  const int64_t slices = ceil_divide(args.cols, kSlice);
  few.block_rows = static_cast<int>(args.rows / blocks);
  few.more_rows = static_cast<int>(args.rows % blocks);
  few.prefetch_bytes = prefetch_bytes(few.block_rows * args.cols / 2);
  few.slices = static_cast<int>(slices);
  few.scale_pitch = static_cast<int>(scale_pitch(slices));
  few.together = static_cast<int>(std::min<int64_t>(slices, kFewWarps));
  few.tile_step = kFewWarps / few.together;
  few.item_step = few.tile_step * kTileRows * few.scale_pitch;
  few.element_step = few.tile_step * kTileRows * static_cast<int>(args.cols);
  few.inverse_slices = inverse_of(slices);
  few.inverse_together = inverse_of(few.together);
  few.row_step = kFewThreads / few.slices;
  few.slice_step = kFewThreads % few.slices;
  few.whole_items = args.blocksize_log2 == 6 && args.cols % kSlice == 0 &&
                    is_multiple(args.absmax, nested ? 4 : 16);

  const ScaleRoom room =
      scale_room(args.cols, nested, args.blocksize_log2 + args.nested_blocksize_log2);
  const int64_t tiles = ceil_divide(ceil_divide(args.rows, blocks), kTileRows);
  few.group_tiles = even_groups(tiles, tiles_that_fit(layout, room, device));
  few.shared_code = layout.partials + few.group_tiles * layout.tile_partials;
  few.shared_nested = few.shared_code + static_cast<int>(room.code);
  few.shared_scales =
      static_cast<int>(ceil_divide(few.shared_nested + few.group_tiles * room.nested + 4, 16) * 16);
  return few.shared_scales + static_cast<int>(few.group_tiles * room.items);
}

cudaError_t fill_in(const MatmulArgs &args, nf4_dtype dtype, MatmulShape shape, int64_t blocks,
                    bool tensor_map, const Device &device, FewArgs &few, int &shared_bytes) {
  few.matmul = args;
  few.codebook = rounded_codebook(args.format, dtype);
  shared_bytes = share_work(few_layout(few_max_m(shape), tensor_map), blocks, device, few);
  if (!tensor_map) return cudaSuccess;
  return make_tensor_map({args.packed, args.rows, args.cols / 2}, args.cols / 2, kSlice / 2,
                         kTileRows, few.packed);
}

}  // namespace

bool few_takes(const MatmulFamily &family, const MatmulProblem &problem, MatmulShape shape,
               const Device &device) {
  if (family.kernels[0][0][shape] == nullptr) return false;
  const Weight &weight = problem.weight;
  // A quarter of a slice must lie in one block, and a thread block's rows in few enough
  // elements, all of which have 32 bits. Past a row's end codes are 0 and so is x, whose product
  // is 0 unless a caller's codebook begins with what is not finite.
  if (weight.codebook != nullptr && weight.cols % kSlice != 0) return false;
  if (problem.m > few_max_m(shape) || weight.cols == 0 || weight.cols % kQuarter != 0) return false;
  if (weight.cols > kFewElements / kTileRows || weight.rows > UINT32_MAX / weight.cols)
    return false;
  if (weight.blocksize() < kQuarter || !is_multiple(weight.packed, 16)) return false;
  if (!has_x_vectors(problem)) return false;
  const int64_t rows = ceil_divide(weight.rows, thread_blocks(weight.rows, device)) + kTileRows;
  // Elements of a nested block have 31 bits.
  const int log2 = weight.nested() ? weight.blocksize_log2 + weight.nested_blocksize_log2 : 0;
  if (log2 > 30) return false;
  return rows <= kFewElements / weight.cols &&
         tiles_that_fit(few_layout(few_max_m(shape), family.tensor_maps),
                        scale_room(weight.cols, weight.nested(), log2), device) > 0;
}

MatmulShape best_few(const MatmulFamily &family, const MatmulProblem &problem,
                     const Device &device) {
  // kFew2 does a tile in less time, kFew8 begins and ends sooner: 6.1 us instead of 5.3 with 31
  // rows of 4096 columns a thread block, 11.5 instead of 12.2 with 109 (NOTES.md, "Kernels of
  // matmul").
  constexpr int64_t kManyRows = 64;
  const bool many = problem.weight.rows >= kManyRows * device.multiprocessors;
  for (const MatmulShape shape : {kFew2, kFew8, kFew16})
    if ((shape != kFew2 || many) && few_takes(family, problem, shape, device)) return shape;
  // Its sums take least room, where rows are very long.
  return few_takes(family, problem, kFew2, device) ? kFew2 : kTiled;
}

cudaError_t launch_few(const MatmulFamily &family, const void *kernel, const MatmulArgs &args,
                       nf4_dtype dtype, MatmulShape shape, const Device &device,
                       cudaStream_t stream) {
  FewArgs few{};
  const int64_t blocks = thread_blocks(args.rows, device);
  int shared_bytes = 0;
  const cudaError_t error =
      fill_in(args, dtype, shape, blocks, family.tensor_maps, device, few, shared_bytes);
  if (error != cudaSuccess) return error;
  return launch({kernel, blocks, kFewThreads, family.family.pdl, stream, shared_bytes}, few);
}

bool few_joins(const FewProducts &products, const MatmulProblem &problem, const Device &device) {
  if (products.count == kFewBatch || device.multiprocessors <= kFewBatch) return false;
  int64_t elements = problem.weight.elements;
  for (int i = 0; i < products.count; ++i) elements += products.list[i]->weight.elements;
  // Half of what a thread block may have, since no share is exactly the mean.
  return elements <= (device.multiprocessors - kFewBatch) * (kFewElements / 2);
}

cudaError_t launch_few_batch(const MatmulFamily &family, const void *kernel, const MatmulArgs *args,
                             int count, nf4_dtype dtype, MatmulShape shape, const Device &device,
                             cudaStream_t stream) {
  FewBatch batch{};
  int64_t blocks[kFewBatch], first_block = 0;
  int shared_bytes = 0;
  WeightSize sizes[kFewBatch];
  for (int i = 0; i < count; ++i) sizes[i] = {args[i].rows, args[i].cols};
  deal_blocks(sizes, count, device.multiprocessors, blocks);
  for (int i = 0; i < count; ++i) {
    int own_bytes = 0;
    const cudaError_t error = fill_in(args[i], dtype, shape, blocks[i], family.tensor_maps, device,
                                      batch.of[i], own_bytes);
    if (error != cudaSuccess) return error;
    shared_bytes = std::max(shared_bytes, own_bytes);
    batch.first_block[i] = static_cast<int>(first_block);
    first_block += blocks[i];
  }
  std::fill(batch.first_block + count, batch.first_block + kFewBatch, INT_MAX);
  return launch({kernel, first_block, kFewThreads, family.family.pdl, stream, shared_bytes}, batch);
}

}  // namespace nf4::cuda
