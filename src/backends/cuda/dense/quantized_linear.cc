#include "backends/cuda/dense/quantized_linear.h"

#include "core/check.h"
#include "quant/activations.h"

namespace cadre::cuda {

void CodesOfX::set(const LinearWeights& weights, QuantizedGemm& product) {
  product.gemm.x = x_.data();
  product.gemm.x_stride = x_.stride(0);
  if (weights.activations == ActivationScheme::kNone) return;
  const bool is_static = weights.activations == ActivationScheme::kStatic;
  const int64_t group = is_static ? 0 : activation_group(product.format);
  const float static_scale = is_static ? weights.input_scale : 0;
  if (codes_.codes == nullptr) {
    codes_ = allocate_activation_codes(x_.dim(0), x_.dim(1), kFp4ActivationGroup, workspace_);
  }
  if (group != group_ || static_scale != static_scale_) {
    QuantizeRows args;
    args.dtype = x_.dtype();
    args.x = x_.data();
    args.x_stride = x_.stride(0);
    args.rows = x_.dim(0);
    args.k = x_.dim(1);
    if (!is_static) args.group = group;
    args.static_scale = static_scale;
    quantize_rows(args, codes_, stream_);
    group_ = group;
    static_scale_ = static_scale;
  }
  set_codes(product, codes_, group);
}

void quantized_linear(CodesOfX& codes, const TensorView& x, const LinearWeights& weights,
                      const MutableTensorView& out, bool accumulate, const Stream& stream) {
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
  codes.set(weights, product);
  if (takes_quantized_rows(product)) return quantized_rows(product, stream);
  quantized_gemm(product, stream);
}

size_t quantized_linear_workspace_bytes(int64_t num_tokens, int64_t k) {
  return activation_codes_bytes(num_tokens, k, kFp4ActivationGroup);
}

}  // namespace cadre::cuda
