// The library's own launches, with what a benchmark may force.
#include <string>
#include <vector>

#include "bench_library.hpp"
#include "configurations.hpp"
#include "cuda/dequant/choose.hpp"
#include "cuda/dequant/kernels.hpp"
#include "cuda/matmul/matmul.hpp"
#include "cuda/runtime/families.hpp"
#include "cuda/runtime/launch.hpp"
#include "support/force_matmul.hpp"
#include "validate.hpp"

namespace {

using nf4::DequantProblem;
using nf4::bench::Configuration;

#if NF4_BENCH_CONFIGURATIONS
using nf4::bench::configurations;
#else
const std::vector<Configuration> &configurations() {
  static const std::vector<Configuration> none;
  return none;
}
#endif

constexpr int kPlain = -1;

class PlainLaunches {
 public:
  explicit PlainLaunches(bool plain) { nf4::cuda::force_plain_launches(plain); }
  ~PlainLaunches() { nf4::cuda::force_plain_launches(false); }
  PlainLaunches(const PlainLaunches &) = delete;
  PlainLaunches &operator=(const PlainLaunches &) = delete;
};

// Each configuration twice: launched plainly, then with programmatic dependent launch.
std::vector<std::string> make_names() {
  std::vector<std::string> names;
  for (const Configuration &each : configurations())
    for (const char *launch : {"", " pdl"})
      names.push_back(std::to_string(each.tiling.threads) + " threads, tile " +
                      std::to_string(each.tiling.warp_tile) + ", " +
                      std::to_string(each.tiling.resident) + " resident" + launch);
  return names;
}

const std::vector<std::string> &names() {
  static const std::vector<std::string> all = make_names();
  return all;
}

// The index of what the library launches, with programmatic dependent launch; -1 if it is
// none of the configurations.
int chosen(const DequantProblem &problem) {
  const nf4::cuda::DequantConfig config = nf4::cuda::choose_dequant(problem);
  if (config == nf4::cuda::kUnaligned || !problem.weight.nested()) return -1;
  const nf4::cuda::DequantTiling tiling = nf4::cuda::dequant_tiling(config);
  for (size_t i = 0; i < configurations().size(); ++i) {
    const nf4::cuda::DequantTiling &other = configurations()[i].tiling;
    if (tiling.threads == other.threads && tiling.warp_tile == other.warp_tile &&
        tiling.resident == other.resident)
      return static_cast<int>(2 * i + 1);
  }
  return -1;
}

// The kernel family of this build for the current device; NULL: none.
const nf4::cuda::GpuFamily *current_family() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
    return nullptr;
  return nf4::cuda::family_for(major * 10 + minor);
}

nf4_status status_of(cudaError_t error) {
  return error == cudaSuccess ? NF4_STATUS_OK : NF4_STATUS_CUDA_ERROR;
}

nf4_status launch(int configuration, const DequantProblem &problem, nf4_stream stream) {
  if (configuration < 0 || configuration >= static_cast<int>(names().size()) ||
      !problem.weight.nested() || nf4::cuda::choose_dequant(problem) == nf4::cuda::kUnaligned)
    return NF4_STATUS_INVALID_ARGUMENT;
  const bool pdl = configuration % 2 == 1;
  if (pdl && !nf4_bench_has_pdl()) return NF4_STATUS_UNSUPPORTED_DEVICE;
  const Configuration &chosen = configurations()[configuration / 2];
  const nf4::cuda::DequantArgs args = nf4::cuda::dequant_args(problem);
  return status_of(nf4::cuda::launch(
      {chosen.kernels[problem.dtype - 1], nf4::ceil_divide(args.elements, chosen.tiling.cta_tile()),
       chosen.tiling.threads, pdl, stream},
      args));
}

}  // namespace

int nf4_bench_has_pdl(void) {
  const nf4::cuda::GpuFamily *family = current_family();
  return family != nullptr && family->pdl;
}

int nf4_bench_dequant_configurations(void) { return static_cast<int>(names().size()); }

const char *nf4_bench_dequant_configuration(int configuration) {
  return names().at(configuration).c_str();
}

int nf4_bench_dequant_chosen(const nf4_tensor *weight, void *out, nf4_dtype out_dtype) {
  DequantProblem problem;
  if (nf4::validate_dequant(weight, out, out_dtype, problem) != NF4_STATUS_OK) return -1;
  return chosen(problem);
}

nf4_status nf4_bench_dequant(int configuration, const nf4_tensor *weight, void *out,
                             nf4_dtype out_dtype, nf4_stream stream) {
  if (configuration == kPlain) {
    const PlainLaunches plain(true);
    return nf4_dequant_launch(weight, out, out_dtype, stream);
  }
  DequantProblem problem;
  if (const nf4_status status = nf4::validate_dequant(weight, out, out_dtype, problem))
    return status;
  return launch(configuration, problem, stream);
}

nf4_status nf4_bench_dequant_stores(const nf4_tensor *weight, void *out, nf4_dtype out_dtype,
                                    int keep, nf4_stream stream) {
  DequantProblem problem;
  if (const nf4_status status = nf4::validate_dequant(weight, out, out_dtype, problem))
    return status;
  const nf4::cuda::GpuFamily *family = current_family();
  if (family == nullptr) return NF4_STATUS_UNSUPPORTED_DEVICE;
  nf4::cuda::DequantArgs args = nf4::cuda::dequant_args(problem);
  args.keep_output = keep != 0;
  const nf4::cuda::DequantConfig config = nf4::cuda::choose_dequant(problem);
  const nf4::cuda::DequantTiling tiling = nf4::cuda::dequant_tiling(config);
  const auto &kernels = nf4::cuda::kernels_of<nf4::cuda::DequantKernels>(*family).of;
  return status_of(
      nf4::cuda::launch({kernels[problem.dtype - 1][problem.weight.nested()][config],
                         nf4::ceil_divide(args.elements + args.shift, tiling.cta_tile()),
                         tiling.threads, false, stream},
                        args));
}

nf4_status nf4_bench_quantize(const void *in, nf4_dtype in_dtype, const nf4_tensor *weight,
                              void *workspace, size_t workspace_bytes, int pdl, nf4_stream stream) {
  const PlainLaunches plain(pdl == 0);
  return nf4_quantize_launch(in, in_dtype, weight, workspace, workspace_bytes, stream);
}

nf4_status nf4_bench_matmul(const nf4_tensor *weight, const nf4_matmul_args *args, void *workspace,
                            size_t workspace_bytes, int pdl, nf4_stream stream) {
  const PlainLaunches plain(pdl == 0);
  return nf4_matmul_launch(weight, args, workspace, workspace_bytes, stream);
}

nf4_status nf4_bench_matmul_batch(const nf4_tensor *const *weights, const nf4_matmul_args *args,
                                  size_t count, void *workspace, size_t workspace_bytes, int pdl,
                                  nf4_stream stream) {
  const PlainLaunches plain(pdl == 0);
  return nf4_matmul_batch_launch(weights, args, count, workspace, workspace_bytes, stream);
}

int nf4_bench_matmul_configurations(void) { return nf4::cuda::kMatmulConfigCount; }

const char *nf4_bench_matmul_configuration(int configuration) {
  return nf4::cuda::kMatmulConfigs[configuration].name;
}

int nf4_bench_matmul_chosen(const nf4_tensor *weight, const nf4_matmul_args *args, void *workspace,
                            size_t workspace_bytes, nf4_stream stream) {
  nf4::MatmulProblem problem;
  int configuration;
  const auto used = static_cast<int64_t>(workspace_bytes);
  if (nf4::validate_matmul_shape(weight, args, problem) != NF4_STATUS_OK ||
      nf4::validate_matmul_operands(weight, args, workspace, used, problem) != NF4_STATUS_OK ||
      nf4::cuda::matmul_config(problem, stream, configuration) != NF4_STATUS_OK)
    return -1;
  return configuration;
}

nf4_status nf4_bench_matmul_as(int configuration, const nf4_tensor *weight,
                               const nf4_matmul_args *args, void *workspace, size_t workspace_bytes,
                               int pdl, nf4_stream stream) {
  if (configuration < 0 || configuration >= nf4::cuda::kMatmulConfigCount)
    return NF4_STATUS_INVALID_ARGUMENT;
  const nf4::test::ForcedMatmul forced(nullptr, configuration);
  // Forced, the library takes another where this one cannot.
  if (nf4_bench_matmul_chosen(weight, args, workspace, workspace_bytes, stream) != configuration)
    return NF4_STATUS_INVALID_ARGUMENT;
  return nf4_bench_matmul(weight, args, workspace, workspace_bytes, pdl, stream);
}

nf4_status nf4_bench_int4_dequant(const nf4_int4_tensor *weight, void *out, nf4_dtype out_dtype,
                                  int pdl, nf4_stream stream) {
  const PlainLaunches plain(pdl == 0);
  return nf4_int4_dequant_launch(weight, out, out_dtype, stream);
}

nf4_status nf4_bench_int4_matmul(const nf4_int4_tensor *weight, const nf4_matmul_args *args,
                                 void *workspace, size_t workspace_bytes, int pdl,
                                 nf4_stream stream) {
  const PlainLaunches plain(pdl == 0);
  return nf4_int4_matmul_launch(weight, args, workspace, workspace_bytes, stream);
}

const char *nf4_bench_int4_matmul_kernel(const nf4_int4_tensor *weight,
                                         const nf4_matmul_args *args) {
  int device = 0;
  int32_t launches = 0;
  const char *kernels = "";
  if (cudaGetDevice(&device) == cudaSuccess)
    nf4_int4_matmul_plan(&weight, args, 1, device, &launches, &kernels);
  return kernels != nullptr ? kernels : "";
}
