#include "cuda/runtime/families.hpp"

namespace nf4::cuda {
namespace {

const GpuFamily *forced_family = nullptr;

}  // namespace

const GpuFamily *family_for(int compute_capability) {
  if (forced_family != nullptr) return forced_family;
  for (const GpuFamily &family : kGpuFamilies)
    if (family.runs_on(compute_capability)) return &family;
  return nullptr;
}

void force_family(const GpuFamily *family) { forced_family = family; }

}  // namespace nf4::cuda
