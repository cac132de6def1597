// Where the launches of a call go: the device of its operands, and the kernels that run there.
#pragma once

#include "cuda/runtime/device.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"
#include "problem.hpp"

namespace nf4::cuda {

struct LaunchTarget {
  Device device;
  const GpuFamily *family;
  cudaStream_t stream;

  // Enqueues a kernel of the family that needs neither dynamic shared memory nor clusters.
  template <class Args>
  cudaError_t launch(const void *kernel, int64_t ctas, int threads, const Args &args) const {
    return cuda::launch({kernel, ctas, threads, family->pdl, stream}, args);
  }
};

// The kernels for the target's device.
nf4_status find_family(LaunchTarget &target);

// Fills in the target of a device, by its number.
nf4_status find_device(int index, LaunchTarget &target);

// Fills in the target of products with these operands.
nf4_status find_target(const Operands *const *products, int count, nf4_stream stream,
                       LaunchTarget &target);

// Calls launch(target), which returns a cudaError_t, with the device of the operands current.
// `launching` says what failed where it does.
template <class Launch>
nf4_status launch_on_device(const Operands &operands, nf4_stream stream, const char *launching,
                            const Launch &launch) {
  LaunchTarget target;
  const Operands *const only = &operands;
  if (const nf4_status status = find_target(&only, 1, stream, target)) return status;
  const CurrentDevice current(target.device.index);
  if (const nf4_status status = current.status()) return status;
  const cudaError_t error = launch(target);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, launching);
}

}  // namespace nf4::cuda
