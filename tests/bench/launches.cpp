// The library's own launches, with what a benchmark may force.
#include "bench_library.hpp"
#include "cuda/device.hpp"

namespace {

class Plain {
 public:
  explicit Plain(bool plain) { nf4::cuda::force_plain_launches(plain); }
  ~Plain() { nf4::cuda::force_plain_launches(false); }
  Plain(const Plain &) = delete;
  Plain &operator=(const Plain &) = delete;
};

}  // namespace

nf4_status nf4_bench_dequant(const nf4_tensor *weight, void *out, nf4_dtype out_dtype, int pdl,
                             nf4_stream stream) {
  const Plain plain(pdl == 0);
  return nf4_dequant_launch(weight, out, out_dtype, stream);
}

nf4_status nf4_bench_quantize(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                              void *workspace, size_t workspace_bytes, int pdl, nf4_stream stream) {
  const Plain plain(pdl == 0);
  return nf4_quantize_launch(in, in_dtype, weight, workspace, workspace_bytes, stream);
}
