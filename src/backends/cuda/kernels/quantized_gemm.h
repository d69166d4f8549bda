// Grouped GEMM with quantised weights on mma.sync, for sm_80 and up: every format, block size,
// layout, alignment and compute dtype. Codes enter the products exactly; the sums over each run of
// K with constant scales are multiplied by them in float32.
#pragma once

#include "backends/cuda/kernels/portable_gemm.h"
#include "backends/cuda/kernels/quantize_rows.h"
#include "cadre/storage_format.h"

namespace cadre::cuda {

/// portable_gemm() with W quantised. `gemm.dtype` is that of x, and of out where it is not float32.
/// With `x_scales`, x holds e4m3 codes (gemm.x_stride in bytes) and gemm.dtype is that of out
/// alone; the scale of row r of x in group g is x_scales[r * x_scale_row_stride + g *
/// x_scale_group_stride].
struct QuantizedGemm {
  PortableGemm gemm;
  StorageFormat format = StorageFormat::kFp8Block;
  ScaleLayout layout;
  const float* x_scales = nullptr;
  int64_t x_scale_row_stride = 0;
  int64_t x_scale_group_stride = 1;
  int64_t x_group = 0;  // k under one scale of x; 0: all
};

/// Makes the codes the x of a product; `group` as they were quantised, 0 with a static scale.
void set_codes(QuantizedGemm& args, const ActivationCodes& codes, int64_t group);

void quantized_gemm(const QuantizedGemm& args, const Stream& stream);

}  // namespace cadre::cuda
