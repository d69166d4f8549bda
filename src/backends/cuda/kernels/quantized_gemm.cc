#include "backends/cuda/kernels/quantized_gemm.h"

#include "backends/cuda/device/check.h"
#include "core/check.h"

namespace cadre::cuda {
namespace portable {

void run_quantized_bf16(const QuantizedGemm& args, cudaStream_t stream);
void run_quantized_f16(const QuantizedGemm& args, cudaStream_t stream);
void run_quantized_f32(const QuantizedGemm& args, cudaStream_t stream);

}  // namespace portable

void set_codes(QuantizedGemm& args, const ActivationCodes& codes, int64_t group) {
  args.gemm.x = codes.codes;
  args.gemm.x_stride = codes.stride;
  args.x_scales = codes.scales;
  args.x_scale_row_stride = codes.groups;
  args.x_scale_group_stride = 1;
  args.x_group = group;
}

void quantized_gemm(const QuantizedGemm& args, const Stream& stream) {
  const PortableGemm& gemm = args.gemm;
  CADRE_ASSERT(is_quantized(args.format));
  CADRE_ASSERT(args.format != StorageFormat::kFp4 || args.layout.block_cols % 2 == 0);
  CADRE_ASSERT(gemm.out_dtype == gemm.dtype || gemm.out_dtype == DType::kF32);
  CADRE_ASSERT(gemm.num_groups == 1 || gemm.offsets != nullptr);
  CADRE_ASSERT(!gemm.accumulate || (gemm.num_groups == 1 && gemm.out_dtype == DType::kF32));
  if (gemm.max_rows == 0 || gemm.n == 0) return;
  // Codes are exact in every dtype of products and fastest to have in fp16.
  if (args.x_scales != nullptr || gemm.dtype == DType::kF16) {
    return portable::run_quantized_f16(args, stream_of(stream));
  }
  if (gemm.dtype == DType::kF32) return portable::run_quantized_f32(args, stream_of(stream));
  portable::run_quantized_bf16(args, stream_of(stream));
}

}  // namespace cadre::cuda
