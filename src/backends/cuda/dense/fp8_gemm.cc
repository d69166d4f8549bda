// Products of many rows with FP8 weights by the e4m3 GEMM of experts: one expert, or one for each
// of the parts into which K is cut.
#include <algorithm>
#include <limits>

#include "backends/cuda/dense/fp8_splits.h"
#include "backends/cuda/dense/quantized_linear.h"
#include "backends/cuda/device/device_runtime.h"

namespace cadre::cuda {
namespace {

HopperFp8Gemm gemm_product(const TensorView& x, const LinearWeights& weights, int64_t splits) {
  HopperFp8Gemm product;
  product.num_experts = splits;
  product.n = weights.weight.dim(0);
  product.k = x.dim(1) / splits;
  product.max_rows = x.dim(0) * splits;
  const TensorView& w = weights.weight;
  const MatrixLayout layout = {DType::kU8, w.data(),    product.k, product.n,
                               splits,     w.stride(0), product.k};
  product.weights = make_tensor_map(layout, kHopperWeightBox, true);
  product.up_weights = product.weights;
  product.scale_layout = weights.scale_layout;
  DeviceMatrices& scales = product.weight_scales;
  scales.first.scales = weights.scales.data();
  scales.first.scale_row_stride = weights.scales.stride(0);
  scales.first.scale_col_stride = weights.scales.stride(1);
  if (weights.scale_layout.block_cols != 0) {
    scales.scale_expert_bytes = fp8_groups(product.k) * weights.scales.stride(1) *
                                static_cast<int64_t>(size_of(weights.scale_layout.dtype));
  }
  product.up_scales = scales;
  return product;
}

// Straight to the outputs.
void multiply_whole(CodesOfX& codes, const TensorView& x, const LinearWeights& weights,
                    const MutableTensorView& out, bool accumulate, bool beside_previous,
                    const Stream& stream) {
  HopperFp8Gemm product = gemm_product(x, weights, 1);
  if (weights.bias) {
    product.bias.first.data = weights.bias.data();
    product.bias_dtype = weights.bias.dtype();
  }
  product.out = out.mutable_data();
  product.out_dtype = out.dtype();
  product.out_stride = out.stride(0);
  product.accumulate = accumulate;
  codes.set(product, 1);
  product.beside_previous = beside_previous && product.count != codes.first_counter();
  hopper_fp8_gemm(product, stream);
}

int64_t sum_stride(int64_t n) { return (n + 3) / 4 * 4; }

// Into how many parts K is cut: what makes all products together take the least time, measured on
// an H200 as microseconds for each 128 of K of a wave of tiles and for bytes of sums.
int64_t choose_splits(int64_t rows, int64_t k, std::span<const LinearWeights* const> weights,
                      const Stream& stream) {
  const double group_us = rows <= 64 ? 0.66 : 1.05;
  constexpr double kSumsUs = 4;
  constexpr double kSumBytesOfUs = 1.5e6;
  if (k % kFp8Group != 0) return 1;
  const int64_t processors = properties_of(stream.device.index).num_multiprocessors;
  int64_t tiles = 0;
  int64_t sums = 0;
  for (const LinearWeights* w : weights) {
    const int64_t n = w->weight.dim(0);
    tiles += (rows + 127) / 128 * ((n + 255) / 256);
    sums += rows * sum_stride(n) * static_cast<int64_t>(sizeof(float));
  }
  const int64_t groups = k / kFp8Group;
  int64_t best = 1;
  double best_us = std::numeric_limits<double>::max();
  for (int64_t splits = 1; splits * tiles <= processors || splits == 1; ++splits) {
    if (splits > groups || static_cast<size_t>(splits * sums) > kFp8SumsBytes) break;
    if (groups % splits != 0) continue;
    const auto waves = static_cast<double>((splits * tiles + processors - 1) / processors);
    double us = group_us * waves * static_cast<double>(groups / splits);
    if (splits > 1) us += kSumsUs + static_cast<double>(splits * sums) / kSumBytesOfUs;
    if (us < best_us) {
      best = splits;
      best_us = us;
    }
  }
  return best;
}

void multiply_split(CodesOfX& codes, const TensorView& x,
                    std::span<const LinearWeights* const> weights,
                    std::span<const MutableTensorView> outs, bool accumulate, int64_t splits,
                    Workspace& workspace, const Stream& stream) {
  const Workspace::Scope scope(workspace);
  SplitSums sums;
  sums.splits = splits;
  sums.rows = x.dim(0);
  for (size_t i = 0; i < weights.size(); ++i) {
    HopperFp8Gemm product = gemm_product(x, *weights[i], splits);
    const int64_t stride = sum_stride(product.n);
    auto* to = workspace.allocate<float>(product.max_rows * stride);
    product.out = to;
    product.out_dtype = DType::kF32;
    product.out_stride = stride;
    codes.set(product, splits);
    product.beside_previous = i > 0 && product.count != codes.first_counter();
    hopper_fp8_gemm(product, stream);
    const int part = sums.num_parts++;
    sums.parts[part] = linear_part(*weights[i], outs[i], accumulate);
    sums.sums[part] = to;
    sums.sum_strides[part] = stride;
  }
  add_splits(sums, stream);
}

}  // namespace

void fp8_linear_gemms(CodesOfX& codes, const TensorView& x,
                      std::span<const LinearWeights* const> weights,
                      std::span<const MutableTensorView> outs, bool accumulate,
                      Workspace& workspace, const Stream& stream) {
  for (size_t first = 0; first < weights.size(); first += LinearRows::kMaxParts) {
    const size_t count = std::min<size_t>(LinearRows::kMaxParts, weights.size() - first);
    const auto some = weights.subspan(first, count);
    const int64_t splits = choose_splits(x.dim(0), x.dim(1), some, stream);
    if (splits > 1) {
      multiply_split(codes, x, some, outs.subspan(first, count), accumulate, splits, workspace,
                     stream);
      continue;
    }
    for (size_t i = 0; i < count; ++i) {
      multiply_whole(codes, x, *some[i], outs[first + i], accumulate, i > 0, stream);
    }
  }
}

}  // namespace cadre::cuda
