// A family: kernels compiled from one .cu for some architectures. The build says for
// which (NF4_ARCHS, NF4_PTX), so the list that selection reads is what was compiled.
#pragma once

namespace nf4::cuda {

struct Family {
  const char *name;
  const int *archs;  // compute capabilities with machine code, such as 75; ends in 0
  int ptx;           // compute capability of its PTX, which later GPUs compile; 0: none
  bool pdl;          // the kernels call pdl_wait, so they may be launched with PDL

  // Machine code runs on its own major version from its minor version on.
  bool runs_on(int compute_capability) const {
    if (ptx != 0 && compute_capability >= ptx) return true;
    for (const int *arch = archs; *arch != 0; ++arch)
      if (compute_capability / 10 == *arch / 10 && compute_capability >= *arch) return true;
    return false;
  }
};

}  // namespace nf4::cuda
