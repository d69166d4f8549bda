#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/portable_gemm.h"
#include "backends/cuda/kernels/portable_gemm_kernel.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

using portable::Problem;

// Of every group: the first one's rows, and the step from group to group.
bool all_fast(const DeviceMatrices& matrices, int64_t element_bytes) {
  return matrices.table == nullptr && portable::is_fast(matrices.first, element_bytes) &&
         matrices.expert_stride * element_bytes % 16 == 0;
}

// Tall tiles read the weights half as often, but waste what a short group leaves of them, and there
// may be too few to fill the GPU.
bool wants_tall_tiles(const PortableGemm& gemm, int device) {
  const int64_t columns = gemm.up_w.first.data != nullptr ? 64 : 128;
  const int64_t tiles = (gemm.max_rows + 127) / 128 * ((gemm.n + columns - 1) / columns);
  return gemm.max_rows > 64 * gemm.num_groups && tiles >= properties_of(device).num_multiprocessors;
}

}  // namespace

void portable_gemm(const PortableGemm& args, const Stream& stream) {
  CADRE_ASSERT(args.out_dtype == args.dtype || args.out_dtype == DType::kF32);
  CADRE_ASSERT(args.num_groups == 1 || args.offsets != nullptr);
  CADRE_ASSERT(!args.accumulate || (args.num_groups == 1 && args.out_dtype == DType::kF32));
  if (args.max_rows == 0 || args.n == 0) return;
  const auto element_bytes = static_cast<int64_t>(size_of(args.dtype));
  const bool has_up = args.up_w.first.data != nullptr;
  Problem problem = {args, false, false};
  problem.fast_x = portable::is_fast({args.x, args.x_stride, 1}, element_bytes);
  problem.fast_w =
      all_fast(args.w, element_bytes) && (!has_up || all_fast(args.up_w, element_bytes));
  const bool tall = wants_tall_tiles(args, stream.device.index);
  switch (args.dtype) {
    case DType::kBF16:
      return portable::run_bf16(problem, tall, stream_of(stream));
    case DType::kF16:
      return portable::run_f16(problem, tall, stream_of(stream));
    default:
      return portable::run_f32(problem, tall, stream_of(stream));
  }
}

}  // namespace cadre::cuda
