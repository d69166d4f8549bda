#include "backends/cuda/dense/quantized_linear.h"

#include <algorithm>
#include <limits>

#include "backends/cuda/dense/fp8_rows.h"
#include "backends/cuda/device/device_runtime.h"
#include "core/check.h"
#include "quant/activations.h"

namespace cadre::cuda {
namespace {

bool is_aligned(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

int64_t row_stride_bytes(const TensorView& x) {
  return x.stride(0) * static_cast<int64_t>(size_of(x.dtype()));
}

bool is_dynamic_fp8(const LinearWeights& weights) {
  const StorageFormat format = format_of(weights);
  return weights.activations == ActivationScheme::kDynamic &&
         (format == StorageFormat::kFp8Block || format == StorageFormat::kFp8Tensor);
}

MatrixLayout layout_of(const TensorView& weight) {
  return {DType::kU8, weight.data(), weight.dim(1), weight.dim(0), 1, weight.stride(0), 0};
}

QuantizedGemm portable_product(const TensorView& x, const LinearWeights& weights,
                               const MutableTensorView& out, bool accumulate) {
  QuantizedGemm product;
  product.format = format_of(weights);
  product.layout = weights.scale_layout;
  CADRE_ASSERT(row_bytes(product.format, x.dim(1)) == weights.weight.dim(1));
  PortableGemm& gemm = product.gemm;
  gemm.dtype = x.dtype();
  gemm.max_rows = x.dim(0);
  gemm.n = weights.weight.dim(0);
  gemm.k = x.dim(1);
  gemm.w.first.data = weights.weight.data();
  gemm.w.first.row_stride = weights.weight.stride(0);
  gemm.w.first.col_stride = weights.weight.stride(1);
  gemm.w.first.scales = weights.scales.data();
  gemm.w.first.scale_row_stride = weights.scales.stride(0);
  gemm.w.first.scale_col_stride = weights.scales.stride(1);
  if (weights.bias) {
    gemm.bias.first.data = weights.bias.data();
    gemm.bias_dtype = weights.bias.dtype();
  }
  gemm.out = out.mutable_data();
  gemm.out_dtype = out.dtype();
  gemm.out_stride = out.stride(0);
  gemm.accumulate = accumulate;
  return product;
}

}  // namespace

void CodesOfX::quantize(int64_t group, float static_scale, int64_t splits) {
  const int64_t rows = x_.dim(0);
  const int64_t k = x_.dim(1);
  if (rows_.codes == nullptr) {
    rows_.codes = workspace_.allocate<uint8_t>(rows * fp8_row_stride(k));
    rows_.scales = workspace_.allocate<float>(rows * num_groups(k, kFp4ActivationGroup));
    counters_ = workspace_.allocate<uint32_t>(kNumCounters);
  }
  const bool has_counters = counters_taken_ < kNumCounters;
  if (group == group_ && static_scale == static_scale_ && splits == splits_ && has_counters) return;
  QuantizeRows args;
  args.dtype = x_.dtype();
  args.x = x_.data();
  args.x_stride = x_.stride(0);
  args.rows = rows;
  args.k = k;
  if (group != 0) args.group = group;
  args.static_scale = static_scale;
  args.codes = rows_.codes;
  args.codes_stride = fp8_row_stride(k / splits);
  args.splits = splits;
  args.scales = rows_.scales;
  args.scale_row_stride = 1;
  args.scale_group_stride = fp8_scale_stride(rows * splits);
  args.zeros = counters_;
  args.num_zeros = kNumCounters;
  args.next_starts_first = true;  // all products read nothing but weights before they wait
  quantize_rows(args, stream_);
  group_ = group;
  static_scale_ = static_scale;
  splits_ = splits;
  counters_taken_ = 0;
}

void CodesOfX::set(const LinearWeights& weights, QuantizedGemm& product) {
  product.gemm.x = x_.data();
  product.gemm.x_stride = x_.stride(0);
  if (weights.activations == ActivationScheme::kNone) return;
  const bool is_static = weights.activations == ActivationScheme::kStatic;
  const int64_t group = is_static ? 0 : activation_group(product.format);
  quantize(group, is_static ? weights.input_scale : 0, 1);
  product.gemm.x = rows_.codes;
  product.gemm.x_stride = fp8_row_stride(x_.dim(1));
  product.x_scales = rows_.scales;
  product.x_scale_row_stride = 1;
  product.x_scale_group_stride = fp8_scale_stride(x_.dim(0));
  product.x_group = group;
}

const Fp8Rows& CodesOfX::fp8_rows() {
  quantize(kActivationGroup, 0, 1);
  return rows_;
}

void CodesOfX::set(HopperFp8Gemm& product, int64_t splits) {
  quantize(kActivationGroup, 0, splits);
  product.rows = rows_;
  product.count = counters_ + counters_taken_++;
}

bool takes_fp8_rows(const TensorView& x, const LinearWeights& weights, const Stream& stream) {
  return is_dynamic_fp8(weights) && fits_fp8_rows(weights.scale_layout) && x.stride(1) == 1 &&
         x.dim(1) % 16 == 0 && weights.weight.stride(1) == 1 &&
         is_aligned(x.data(), row_stride_bytes(x)) &&
         is_aligned(weights.weight.data(), weights.weight.stride(0)) &&
         max_fp8_rows(x.dim(1), stream) > 0;
}

bool prefers_fp8_rows(int64_t rows, int64_t n, int64_t k) {
  // Measured on an H200. Each 16 rows (8 where K is long) read the weights again; the GEMM waits
  // for less the more weights there are.
  if (rows <= 8) return true;
  if (rows <= 16) return n * k < 100'000'000;
  return rows <= 32 && n * k < 4'000'000;
}

void fp8_linear_rows(CodesOfX& codes, const TensorView& x,
                     std::span<const LinearWeights* const> weights,
                     std::span<const MutableTensorView> outs, bool accumulate,
                     const Stream& stream) {
  const int64_t most = max_fp8_rows(x.dim(1), stream);
  Fp8Rows rows;
  if (wants_codes(x.dim(0), x.dim(1))) rows = codes.fp8_rows();
  for (int64_t first = 0; first < x.dim(0); first += most) {
    const int64_t last = std::min(first + most, x.dim(0));
    Fp8LinearRows args;
    args.dtype = x.dtype();
    args.x = x.slice(first, last).data();
    args.x_stride = x.stride(0);
    args.rows = last - first;
    args.k = x.dim(1);
    if (rows.codes != nullptr) {
      args.x_codes = rows.codes + first * fp8_row_stride(args.k);
      args.x_code_stride = fp8_row_stride(args.k);
      args.x_scales = rows.scales + first;
      args.x_scale_stride = fp8_scale_stride(x.dim(0));
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      const int part = args.num_parts++;
      const LinearWeights& w = *weights[i];
      args.parts[part] = linear_part(w, outs[i].slice(first, last), accumulate);
      args.scales[part] =
          block_scales(w.scale_layout, w.scales.data(), w.scales.stride(0), w.scales.stride(1));
      if (args.num_parts < LinearRows::kMaxParts && i + 1 < weights.size()) continue;
      fp8_rows(args, stream);
      args.num_parts = 0;
    }
  }
}

bool takes_fp8_gemm(const TensorView& x, const LinearWeights& weights, const MutableTensorView& out,
                    const Stream& stream) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  return compute_capability(stream.device.index) == 90 && is_dynamic_fp8(weights) &&
         fits_hopper_fp8_scales(weights.scale_layout) && x.dim(1) > 0 && x.dim(0) < kMost &&
         weights.weight.dim(0) < kMost && weights.weight.stride(1) == 1 &&
         fits_tensor_map(layout_of(weights.weight)) &&
         is_aligned(out.data(), row_stride_bytes(out)) &&
         (out.dtype() == DType::kF32 || out.dim(1) % 8 == 0);
}

void quantized_linear(CodesOfX& codes, const TensorView& x, const LinearWeights& weights,
                      const MutableTensorView& out, bool accumulate, const Stream& stream) {
  if (x.dim(0) == 0 || weights.weight.dim(0) == 0) return;
  QuantizedGemm product = portable_product(x, weights, out, accumulate);
  codes.set(weights, product);
  if (takes_quantized_rows(product)) return quantized_rows(product, stream);
  quantized_gemm(product, stream);
}

size_t quantized_linear_workspace_bytes(int64_t num_tokens, int64_t k) {
  const int64_t scales = num_tokens * num_groups(k, kFp4ActivationGroup);
  return Workspace::padded(static_cast<size_t>(num_tokens * fp8_row_stride(k))) +
         Workspace::padded(static_cast<size_t>(scales) * sizeof(float)) +
         Workspace::padded(CodesOfX::kNumCounters * sizeof(uint32_t));
}

}  // namespace cadre::cuda
