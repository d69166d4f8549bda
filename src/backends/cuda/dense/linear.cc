// Products: few rows by our own kernels, more by the dense product of the device; with quantised
// weights as quantized_linear.h says.
#include <algorithm>
#include <string>

#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/linear_rows.h"
#include "backends/cuda/dense/quantized_linear.h"
#include "backends/cuda/kernels/matmul.h"
#include "core/check.h"

namespace cadre::cuda {

LinearPart linear_part(const LinearWeights& weights, const MutableTensorView& out,
                       bool accumulate) {
  LinearPart part;
  part.weight = weights.weight.data();
  part.weight_stride = weights.weight.stride(0);
  if (weights.bias) {
    part.bias = weights.bias.data();
    part.bias_dtype = weights.bias.dtype();
  }
  part.out = out.mutable_data();
  part.out_dtype = out.dtype();
  part.out_stride = out.stride(0);
  part.n = weights.weight.dim(0);
  part.accumulate = accumulate;
  return part;
}

namespace {

constexpr int64_t kMostForManyRows = 16 << 20;

void multiply(const TensorView& x, const LinearWeights& weights, const MutableTensorView& out,
              bool accumulate, Workspace& workspace, const Stream& stream) {
  Matmul product;
  product.dtype = x.dtype();
  product.m = x.dim(0);
  product.n = weights.weight.dim(0);
  product.k = weights.weight.dim(1);
  product.x = x.data();
  product.x_stride = x.stride(0);
  product.w = {weights.weight.data(), weights.weight.stride(0), weights.weight.stride(1)};
  if (weights.bias) {
    CADRE_ASSERT(weights.bias.dtype() == x.dtype());
    product.bias = weights.bias.data();
  }
  product.out = out.mutable_data();
  product.out_dtype = out.dtype();
  product.out_stride = out.stride(0);
  product.accumulate = accumulate;
  matmul(product, workspace, stream);
}

// A few rows: all weights in one launch.
void multiply_rows(const TensorView& x, std::span<const LinearWeights* const> weights,
                   std::span<const MutableTensorView> outs, bool accumulate, const Stream& stream) {
  LinearRows args;
  args.dtype = x.dtype();
  args.x = x.data();
  args.x_stride = x.stride(0);
  args.rows = x.dim(0);
  args.k = x.dim(1);
  for (size_t i = 0; i < weights.size(); ++i) {
    args.parts[args.num_parts++] = linear_part(*weights[i], outs[i], accumulate);
    if (args.num_parts < LinearRows::kMaxParts && i + 1 < weights.size()) continue;
    linear_rows(args, stream);
    args.num_parts = 0;
  }
}

void multiply_plain(const TensorView& x, std::span<const LinearWeights* const> weights,
                    std::span<const MutableTensorView> outs, bool accumulate, Workspace& workspace,
                    const Stream& stream) {
  bool by_rows = x.dim(0) <= max_linear_rows(x.dtype()) && x.stride(1) == 1;
  int64_t elements = 0;  // of all weights
  for (size_t i = 0; i < weights.size(); ++i) {
    const TensorView& weight = weights[i]->weight;
    CADRE_ASSERT(x.dtype() == weight.dtype() && x.dim(1) == weight.dim(1) &&
                 outs[i].dim(0) == x.dim(0) && outs[i].dim(1) == weight.dim(0));
    by_rows = by_rows && weight.stride(1) == 1;
    elements += weight.numel();
  }
  // Measured on an H200: with more rows than that, reading x again and again costs more than what
  // the library loses on small weights.
  if (x.dim(0) > 16 && elements > kMostForManyRows) by_rows = false;
  if (by_rows) return multiply_rows(x, weights, outs, accumulate, stream);
  for (size_t i = 0; i < weights.size(); ++i) {
    multiply(x, *weights[i], outs[i], accumulate, workspace, stream);
  }
}

bool is_quantized(const LinearWeights* weights) { return bool(weights->scales); }

// FP8 weights alone: all in one launch, or beside each other.
bool multiply_fp8(CodesOfX& codes, const TensorView& x,
                  std::span<const LinearWeights* const> weights,
                  std::span<const MutableTensorView> outs, bool accumulate, Workspace& workspace,
                  const Stream& stream) {
  if (x.dim(0) == 0) return false;
  bool by_rows = true;
  bool by_gemm = true;
  int64_t n = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const LinearWeights& w = *weights[i];
    if (!is_quantized(&w) || w.weight.dim(0) == 0) return false;
    by_rows = by_rows && takes_fp8_rows(x, w, stream);
    by_gemm = by_gemm && takes_fp8_gemm(x, w, outs[i], stream);
    n += w.weight.dim(0);
  }
  if (by_rows && (prefers_fp8_rows(x.dim(0), n, x.dim(1)) || (!by_gemm && x.dim(0) <= 64))) {
    fp8_linear_rows(codes, x, weights, outs, accumulate, stream);
    return true;
  }
  if (by_gemm) fp8_linear_gemms(codes, x, weights, outs, accumulate, workspace, stream);
  return by_gemm;
}

void multiply_all(const TensorView& x, std::span<const LinearWeights* const> weights,
                  std::span<const MutableTensorView> outs, bool accumulate, Workspace& workspace,
                  const Stream& stream) {
  CADRE_ASSERT(weights.size() == outs.size());
  if (std::none_of(weights.begin(), weights.end(), is_quantized)) {
    return multiply_plain(x, weights, outs, accumulate, workspace, stream);
  }
  const Workspace::Scope scope(workspace);
  CodesOfX codes(x, workspace, stream);
  if (multiply_fp8(codes, x, weights, outs, accumulate, workspace, stream)) return;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto one = weights.subspan(i, 1);
    const auto out = outs.subspan(i, 1);
    if (!is_quantized(weights[i])) {
      multiply_plain(x, one, out, accumulate, workspace, stream);
    } else if (!multiply_fp8(codes, x, one, out, accumulate, workspace, stream)) {
      quantized_linear(codes, x, *weights[i], outs[i], accumulate, stream);
    }
  }
}

size_t product_workspace_bytes(int64_t num_tokens, int64_t k) {
  return quantized_linear_workspace_bytes(num_tokens, k) +
         std::max(matmul_workspace_bytes(), Workspace::padded(kFp8SumsBytes));
}

}  // namespace

void CudaDenseOps::linear(const TensorView& x, const LinearWeights& weights, MutableTensorView out,
                          Workspace& workspace, const Stream& stream) {
  const LinearWeights* const all[] = {&weights};
  multiply_all(x, all, {&out, 1}, false, workspace, stream);
}

size_t CudaDenseOps::linear_workspace_bytes(int64_t num_tokens, int64_t k, DType /*compute_dtype*/,
                                            int /*num_threads*/) const {
  return product_workspace_bytes(num_tokens, k);
}

void CudaDenseOps::linear_group(const TensorView& x, std::span<const LinearWeights* const> weights,
                                std::span<const MutableTensorView> outs, Workspace& workspace,
                                const Stream& stream) {
  multiply_all(x, weights, outs, false, workspace, stream);
}

void CudaDenseOps::linear_add(const TensorView& x, const LinearWeights& weights,
                              MutableTensorView y, Workspace& workspace, const Stream& stream) {
  const LinearWeights* const all[] = {&weights};
  multiply_all(x, all, {&y, 1}, true, workspace, stream);
}

size_t CudaDenseOps::linear_add_workspace_bytes(int64_t num_tokens, int64_t /*n*/, int64_t k,
                                                DType /*compute_dtype*/,
                                                int /*num_threads*/) const {
  return product_workspace_bytes(num_tokens, k);
}

std::string_view CudaDenseOps::instruction_set() const {
  static const std::string library = matmul_library();
  return library;
}

DenseOps& dense_ops() {
  static CudaDenseOps ops;
  return ops;
}

}  // namespace cadre::cuda
