// y = x W^T for many rows of x on Hopper. The weight is operand A of wgmma, from registers, and x
// is B, in shared memory: wgmma's m64 runs along N, the rows of the weight (swap_ab in DeepGEMM).
//
// CTAs are persistent, one per multiprocessor, and warp-specialized: a producer warpgroup loads x,
// the weight and its scales; each consumer warpgroup decodes 64 rows of the weight while the tensor
// cores multiply the previous step. Three mainloops apply scales to the sums of a step, to those of
// a K-tile (integers), or to weights. If there are few tiles, clusters split them along K, or the
// CTAs of the stream-K kernels, which also share tiles that do not fill the last wave. The bound is
// shared memory up to 128 rows of x, then decoding between two steps (1200 cycles where the tensor
// cores take 1024), and power from about 1000 rows on. docs/design/matmul-wgmma.md draws the data
// path and has the cycle counts and experiments.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/arch.cuh"
#include "cuda/matmul/wgmma/epilogue.cuh"
#include "cuda/matmul/wgmma/mainloop_group_sums.cuh"
#include "cuda/matmul/wgmma/mainloop_scaled_sums.cuh"
#include "cuda/matmul/wgmma/mainloop_scaled_weights.cuh"
#include "cuda/matmul/wgmma/producer.cuh"
#include "cuda/matmul/wgmma/scheduler.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace nf4::cuda {
namespace {

// Two threads of different warps call it: one with `of_x`, for the barriers of x, and one for those
// of the weight.
template <class Tile>
__device__ __forceinline__ void init_barriers(SharedStorage<Tile> shared, bool of_x) {
  using Smem = SharedLayout<Tile>;
  constexpr int kConsumerArrivals = Tile::kConsumers / 32 * kWarpArrivals;
  constexpr int kScaleArrivals = kScaleThreads / 32 * kWarpArrivals;
  const int stages = of_x ? Smem::kXStages : Smem::kWeightStages;
#pragma unroll
  for (int stage = 0; stage < kMaxStages; ++stage) {
    if (stage >= stages) break;
    mbarrier_init(shared.barrier(of_x ? kXFull : kWeightFull, stage),
                  of_x ? 1 : 1 + kScaleArrivals);
    mbarrier_init(shared.barrier(of_x ? kXEmpty : kWeightEmpty, stage), kConsumerArrivals);
  }
  if (of_x) {
    mbarrier_init(shared.first_scales(), kScaleArrivals);
#pragma unroll
    for (int part = 0; part < Smem::kParts; ++part) mbarrier_init(shared.partials(part), 1);
  }
  fence_mbarrier_init();
}

// The registers of a thread. A launch gives all threads an equal share, of which the producers need
// few.
template <class Tile>
struct WarpgroupRegisters {
  static constexpr int kProducer = Tile::kWarpgroups == 2 ? 56 : 64;
  static constexpr int kConsumer = Tile::kWarpgroups == 2 ? 224 : 104;
};

// Applies the global scales of a kind of weight that has them.
template <class Tile, class Scheduler>
__device__ __forceinline__ void scale_sums([[maybe_unused]] const typename Tile::Args &args,
                                           [[maybe_unused]] const Scheduler &scheduler,
                                           [[maybe_unused]] typename Tile::Accumulators &sums) {
  if constexpr (Tile::Kind::kGlobalScales)
    Tile::Kind::template scale_sums<Tile>(args, scheduler.work_tile(), sums);
}

template <class Mainloop, class Scheduler, class Epilogue, class Tile>
__device__ __forceinline__ void consume(const typename Tile::Args &args, SharedStorage<Tile> shared,
                                        Epilogue &epilogue) {
  Mainloop mainloop(shared);
  for (Scheduler scheduler(args); scheduler.is_valid(); scheduler.advance()) {
    // The calls of work_tile() compute the work tile anew, so that it takes no registers in the
    // mainloop.
    if constexpr (Scheduler::kReadsMemory) {
      mainloop.run(scheduler.work_tile(), scheduler.rows(), [&] {
        scale_sums<Tile>(args, scheduler, mainloop.sums());
        epilogue.store(scheduler, mainloop.sums());
      });
      continue;
    }
    mainloop.run(scheduler.work_tile());
    scale_sums<Tile>(args, scheduler, mainloop.sums());
    if constexpr (Tile::Kind::kLora)
      if (args.lora.k_tiles > 0)  // otherwise no work tile is computed
        mainloop.add_lora(lora_k_tiles<Tile>(args, scheduler.work_tile()), args.lora.k_steps,
                          epilogue.unit());
    epilogue.store(scheduler, mainloop.sums());
  }
}

template <class Decode, class Tile, class Scheduler>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    matmul_wgmma(const __grid_constant__ typename Tile::Args args) {
  using Mainloop =
      std::conditional_t<Tile::kScaleOn == ScaleOn::kSums, MainloopScaledSums<Decode, Tile>,
                         MainloopScaledWeights<Decode, Tile>>;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  const SharedStorage<Tile> shared{dynamic};
  if (threadIdx.x == 0) init_barriers(shared, true);
  if (threadIdx.x == 32) init_barriers(shared, false);
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<WarpgroupRegisters<Tile>::kProducer>();
    produce<Tile, Scheduler>(args, shared);
    if (!Scheduler::kStreamK && args.cluster_size > 1)
      ClusterReduction<Tile>(shared, args.cluster_size).prepare();
  } else {
    setmaxnreg_inc<WarpgroupRegisters<Tile>::kConsumer>();
    Epilogue<typename Decode::Element, Tile> epilogue(
        args, shared, Tile::Kind::template begin_consumer<Decode, Tile>(args, shared));
    if constexpr (Tile::Kind::kGroups && Tile::kScaleOn == ScaleOn::kSums)
      if (args.decode.group_steps % 2 == 0)
        return consume<MainloopGroupSums<Decode, Tile>, Scheduler>(args, shared, epilogue);
    consume<Mainloop, Scheduler>(args, shared, epilogue);
  }
}

}  // namespace
}  // namespace nf4::cuda
