#include "cuda/runtime/target.hpp"

#include "cuda/runtime/locate.hpp"

namespace nf4::cuda {

nf4_status find_family(LaunchTarget &target) {
  target.family = family_for(target.device.compute_capability);
  return target.family == nullptr ? no_family(target.device) : NF4_STATUS_OK;
}

nf4_status find_device(int index, LaunchTarget &target) {
  int count = 0;
  if (const nf4_status status = check_device(index, count)) return status;
  if (const nf4_status status = cached_device(index, target.device)) return status;
  return find_family(target);
}

nf4_status find_target(const Operands *const *products, int count, nf4_stream stream,
                       LaunchTarget &target) {
  target.stream = stream;
  if (const nf4_status status = locate(products, count, stream, target.device)) return status;
  return find_family(target);
}

}  // namespace nf4::cuda
