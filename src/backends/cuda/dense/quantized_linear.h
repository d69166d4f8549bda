// Products with quantised weights: few rows by a kernel that streams the weights, more by the
// grouped GEMM of quantised weights with one group.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/kernels/quantized_gemm.h"
#include "dense/dense_ops.h"

namespace cadre::cuda {

/// x beside the weights of a group of products: quantised once for neighbours that take the same
/// codes. Takes its memory from the workspace when the first one asks.
class CodesOfX {
 public:
  CodesOfX(const TensorView& x, Workspace& workspace, const Stream& stream)
      : x_(x), workspace_(workspace), stream_(stream) {}

  /// Makes x, or its codes, the x of a product with `weights`.
  void set(const LinearWeights& weights, QuantizedGemm& product);

 private:
  const TensorView& x_;
  Workspace& workspace_;
  const Stream& stream_;
  ActivationCodes codes_;
  int64_t group_ = -1;  // of codes_; -1: none yet
  float static_scale_ = 0;
};

/// out = x W^T + b (+ out).
void quantized_linear(CodesOfX& codes, const TensorView& x, const LinearWeights& weights,
                      const MutableTensorView& out, bool accumulate, const Stream& stream);

/// Of all products of x together.
size_t quantized_linear_workspace_bytes(int64_t num_tokens, int64_t k);

/// Rows that quantized_rows() takes at a time; more are taken in turns.
inline constexpr int64_t kMaxQuantizedRows = 16;

/// Whether quantized_rows() takes a product: few rows, K in multiples of 16, everything aligned to
/// 16 bytes.
bool takes_quantized_rows(const QuantizedGemm& product);

/// quantized_gemm() of one group without a gate, weights read once for every eight rows.
void quantized_rows(const QuantizedGemm& product, const Stream& stream);

}  // namespace cadre::cuda
