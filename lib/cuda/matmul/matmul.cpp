// Host side of matmul: validate locations, choose a kernel, launch.
#include <algorithm>
#include <iterator>
#include <optional>

#include "cuda/backend.hpp"
#include "cuda/matmul/few.hpp"
#include "cuda/matmul/select.hpp"
#include "cuda/matmul/wide.hpp"
#include "cuda/runtime/launch.hpp"
#include "cuda/runtime/locate.hpp"
#include "nf4_gpu_families.hpp"

namespace nf4::cuda {
namespace {

// The compile matrix of this operation: 2 dtypes x flat/nested x 4 shapes each, and all but kTiled
// for several weights too.
const MatmulFamily *const kFamilies[] = {
#if NF4_HAVE_SM90
    &kMatmulSm90,
#endif
#if NF4_HAVE_SM80
    &kMatmulSm80,
#endif
#if NF4_HAVE_SM75
    &kMatmulSm75,
#endif
    nullptr,
};

const MatmulFamily *forced_family = nullptr;
std::optional<MatmulShape> forced_shape;

const MatmulFamily *family_for(int compute_capability) {
  if (forced_family != nullptr) return forced_family;
  for (const MatmulFamily *const *family = kFamilies; *family != nullptr; ++family)
    if ((*family)->family.runs_on(compute_capability)) return *family;
  return nullptr;
}

MatmulArgs matmul_args(const MatmulProblem &problem) {
  const Weight &weight = problem.weight;
  MatmulArgs args{};
  args.packed = weight.packed;
  args.absmax = weight.absmax;
  args.nested_absmax = weight.nested_absmax;
  args.nested_code = weight.nested_code;
  args.nested_offset = weight.nested_offset;
  args.codebook = weight.codebook;
  args.x = problem.x;
  args.bias = problem.bias;
  args.y = problem.y;
  args.m = problem.m;
  args.rows = weight.rows;
  args.cols = weight.cols;
  args.x_stride = problem.x_stride;
  args.y_stride = problem.y_stride;
  args.format = weight.format;
  args.blocksize_log2 = weight.blocksize_log2;
  args.nested_blocksize_log2 = weight.nested_blocksize_log2;
  args.x_vectors = has_x_vectors(problem);
  args.whole_runs = is_multiple(weight.packed, 16) && weight.cols % 32 == 0;
  return args;
}

// The wide kernels are Hopper's, and go with the family that is.
bool has_wide([[maybe_unused]] const MatmulFamily &family,
              [[maybe_unused]] int compute_capability) {
#if NF4_HAVE_SM90A
  return &family == &kMatmulSm90 && compute_capability == 90;
#else
  return false;
#endif
}

cudaError_t shape_for(const MatmulProblem &problem, const MatmulFamily &family,
                      const Device &device, MatmulShape &shape) {
  const bool wide = has_wide(family, device.compute_capability);
  if (forced_shape) {
    const MatmulShape forced = *forced_shape;
    const bool takes = is_wide(forced)    ? wide && wide_takes(problem, forced, device)
                       : forced == kTiled ? true
                                          : few_takes(family, problem, forced, device);
    shape = takes ? forced : kTiled;
    return cudaSuccess;
  }
  shape = best_few(family, problem, device);
  if (shape == kFew2 || shape == kFew8) return cudaSuccess;
  return wide ? best_wide(problem, device, shape) : cudaSuccess;
}

// For several weights in one launch; NULL if there is none of that shape.
const void *batch_kernel(const MatmulProblem &problem, const MatmulFamily &family,
                         MatmulShape shape) {
  if (shape >= kFamilyShapes) return nullptr;
  return family.batches[problem.dtype - NF4_DTYPE_FP16][problem.weight.nested()][shape];
}

// Thread blocks may have more shared memory than by default only after this, once a device.
cudaError_t allow_shared_memory(const MatmulFamily &family, const Device &device) {
  static ContextFlag known[std::size(kFamilies)];
  ContextFlag &of_family = known[std::find(kFamilies, std::end(kFamilies), &family) - kFamilies];
  if (of_family.has(device.index)) return cudaSuccess;
  for (const auto *kernels : {&family.kernels, &family.batches})
    for (const auto &dtype : *kernels)
      for (const auto &nested : dtype)
        for (int shape = kFew2; shape < kFamilyShapes; ++shape) {
          if (nested[shape] == nullptr) continue;
          const cudaError_t error = cudaFuncSetAttribute(
              nested[shape], cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
          if (error != cudaSuccess) return error;
        }
  of_family.set(device.index);
  return cudaSuccess;
}

int64_t tiled_blocks(const MatmulProblem &problem) {
  return ceil_divide(problem.weight.rows, kTiledRows) * ceil_divide(problem.m, kTiledM);
}

// The device of the problems, and the family that runs there.
nf4_status find_family(const MatmulProblem *problems, int count, nf4_stream stream, Device &device,
                       const MatmulFamily *&family) {
  const Operands *operands[NF4_MATMUL_BATCH_MAX];
  for (int i = 0; i < count; ++i) operands[i] = &problems[i].operands;
  if (const nf4_status status = locate(operands, count, stream, device)) return status;
  family = family_for(device.compute_capability);
  return family != nullptr ? NF4_STATUS_OK : no_family(device);
}

cudaError_t launch_shape(const MatmulProblem &problem, const MatmulFamily &family,
                         MatmulShape shape, const Device &device, cudaStream_t stream) {
  if (is_wide(shape)) return launch_wide(problem, matmul_args(problem), shape, device, stream);
  // A weight without elements has no scales to be told of.
  const bool nested = problem.weight.nested() && problem.weight.elements != 0;
  const void *kernel = family.kernels[problem.dtype - NF4_DTYPE_FP16][nested][shape];
  const MatmulArgs args = matmul_args(problem);
  if (shape == kTiled)
    return launch({kernel, tiled_blocks(problem), kTiledThreads, family.family.pdl, stream}, args);
  const cudaError_t error = allow_shared_memory(family, device);
  if (error != cudaSuccess) return error;
  return launch_few(family, kernel, args, problem.dtype, shape, device, stream);
}

// The problems that are still to be launched.
class Waiting {
 public:
  Waiting(const MatmulProblem *problems, int count, const MatmulFamily &family,
          const Device &device)
      : problems_(problems), count_(count), family_(family), device_(device) {}

  // First of all. The device is current.
  cudaError_t choose_shapes() {
    for (int i = 0; i < count_; ++i) {
      waits_[i] = !problems_[i].empty();
      if (!waits_[i]) continue;
      const cudaError_t error = shape_for(problems_[i], family_, device_, shapes_[i]);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  // The first of them, or NULL.
  const MatmulProblem *next() {
    while (first_ < count_ && !waits_[first_]) ++first_;
    return first_ < count_ ? problems_ + first_ : nullptr;
  }
  MatmulShape shape() const { return shapes_[first_]; }

  // Takes the first, and those that can go into one launch with it.
  FewProducts take_together() {
    FewProducts taken;
    for (int i = first_; i < count_; ++i) {
      if (!waits_[i] || (i != first_ && !joins(taken, i))) continue;
      taken.list[taken.count++] = problems_ + i;
      waits_[i] = false;
    }
    return taken;
  }

 private:
  bool joins(const FewProducts &taken, int i) const {
    const MatmulProblem &first = problems_[first_], &problem = problems_[i];
    return shapes_[i] == shapes_[first_] && problem.dtype == first.dtype &&
           problem.weight.nested() == first.weight.nested() &&
           batch_kernel(first, family_, shapes_[first_]) != nullptr &&
           few_joins(taken, problem, device_);
  }

  const MatmulProblem *problems_;
  int count_;
  const MatmulFamily &family_;
  const Device &device_;
  int first_ = 0;
  bool waits_[NF4_MATMUL_BATCH_MAX];
  MatmulShape shapes_[NF4_MATMUL_BATCH_MAX];
};

cudaError_t launch_together(const FewProducts &products, const MatmulFamily &family,
                            MatmulShape shape, const Device &device, cudaStream_t stream) {
  const cudaError_t error = allow_shared_memory(family, device);
  if (error != cudaSuccess) return error;
  MatmulArgs args[kFewBatch];
  for (int i = 0; i < products.count; ++i) args[i] = matmul_args(*products.list[i]);
  const MatmulProblem &first = *products.list[0];
  return launch_few_batch(family, batch_kernel(first, family, shape), args, products.count,
                          first.dtype, shape, device, stream);
}

}  // namespace

const MatmulFamily *const *matmul_families() { return kFamilies; }

const char *matmul_shape_name(MatmulShape shape) {
  static constexpr const char *kNames[] = {
      "tiled",       "few2",      "few8",      "few16",     "wide16 tall", "wide32 tall",
      "wide64 tall", "wide64",    "wide128",   "wide152",   "wide176",     "wide208",
      "wide256",     "wide272",   "wide304",   "stream128", "stream152",   "stream176",
      "stream208",   "stream256", "stream272", "stream304"};
  static_assert(std::size(kNames) == kMatmulShapes, "a name for each shape");
  return kNames[shape];
}

nf4_status matmul_shape(const MatmulProblem &problem, nf4_stream stream, MatmulShape &shape) {
  Device device;
  const MatmulFamily *family = nullptr;
  if (const nf4_status status = find_family(&problem, 1, stream, device, family)) return status;
  const CurrentDevice current(device.index);
  if (current.error() != cudaSuccess) return fail_cuda(current.error(), "cudaSetDevice");
  const cudaError_t error = shape_for(problem, *family, device, shape);
  return error == cudaSuccess ? NF4_STATUS_OK : fail_cuda(error, "loading matmul's kernels");
}

void force_matmul(const MatmulFamily *family, std::optional<MatmulShape> shape) {
  forced_family = family;
  forced_shape = shape;
}

bool matmul_has(const MatmulFamily &family, MatmulShape shape, int compute_capability) {
  return is_wide(shape) ? has_wide(family, compute_capability)
                        : family.kernels[0][0][shape] != nullptr;
}

cudaError_t load_matmul_kernels(const Device &device) {
  const MatmulFamily *family = family_for(device.compute_capability);
  if (family == nullptr) return cudaSuccess;
  cudaError_t error = load_kernels(&family->kernels[0][0][0], 2 * 2 * kFamilyShapes);
  if (error == cudaSuccess) error = load_kernels(&family->batches[0][0][0], 2 * 2 * kFamilyShapes);
  if (error == cudaSuccess) error = allow_shared_memory(*family, device);
  if (error == cudaSuccess && has_wide(*family, device.compute_capability))
    error = load_wide_kernels(device);
  return error;
}

nf4_status matmul(const MatmulProblem *problems, int count, nf4_stream stream) {
  Device device;
  const MatmulFamily *family = nullptr;
  if (const nf4_status status = find_family(problems, count, stream, device, family)) return status;

  const CurrentDevice current(device.index);
  if (current.error() != cudaSuccess) return fail_cuda(current.error(), "cudaSetDevice");
  Waiting waiting(problems, count, *family, device);
  cudaError_t error = waiting.choose_shapes();
  if (error != cudaSuccess) return fail_cuda(error, "loading matmul's kernels");
  while (const MatmulProblem *problem = waiting.next()) {
    const MatmulShape shape = waiting.shape();
    const FewProducts products = waiting.take_together();
    error = products.count > 1 ? launch_together(products, *family, shape, device, stream)
                               : launch_shape(*problem, *family, shape, device, stream);
    if (error != cudaSuccess) return fail_cuda(error, "launching matmul");
  }
  return NF4_STATUS_OK;
}

}  // namespace nf4::cuda
