// Products with quantised weights. FP8 with dynamic activations on Hopper: few rows by the kernel
// that streams the weights (fp8_rows.h), more by the e4m3 GEMM of experts with one expert. All
// else: few rows by a plainer kernel, more by the grouped GEMM of quantised weights with one group.
#pragma once

#include <cstdint>
#include <span>

#include "backends/cuda/kernels/hopper_fp8_gemm.h"
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
  /// The same, dynamic activations of FP8. With `splits`, K is cut into so many experts' rows.
  void set(HopperFp8Gemm& product, int64_t splits);
  const Fp8Rows& fp8_rows();
  /// The counter of the first product after x was quantised.
  const uint32_t* first_counter() const { return counters_; }

  static constexpr int kNumCounters = 16;  // products between two quantisations

 private:
  void quantize(int64_t group, float static_scale, int64_t splits);

  const TensorView& x_;
  Workspace& workspace_;
  const Stream& stream_;
  Fp8Rows rows_;
  uint32_t* counters_ = nullptr;  // of HopperFp8Gemm
  int counters_taken_ = 0;
  int64_t group_ = -1;  // of rows_; 0: a static scale, -1: none yet
  float static_scale_ = 0;
  int64_t splits_ = 1;
};

/// out = x W^T + b (+ out).
void quantized_linear(CodesOfX& codes, const TensorView& x, const LinearWeights& weights,
                      const MutableTensorView& out, bool accumulate, const Stream& stream);

/// Of all products of x together.
size_t quantized_linear_workspace_bytes(int64_t num_tokens, int64_t k);

/// Whether fp8_linear_rows() takes a weight beside x, with any number of rows.
bool takes_fp8_rows(const TensorView& x, const LinearWeights& weights, const Stream& stream);
/// Whether it is the fastest for so many rows and weights of so many rows in all.
bool prefers_fp8_rows(int64_t rows, int64_t n, int64_t k);
/// All weights in one launch for every max_fp8_rows() rows of x and few weights.
void fp8_linear_rows(CodesOfX& codes, const TensorView& x,
                     std::span<const LinearWeights* const> weights,
                     std::span<const MutableTensorView> outs, bool accumulate,
                     const Stream& stream);

bool takes_fp8_gemm(const TensorView& x, const LinearWeights& weights, const MutableTensorView& out,
                    const Stream& stream);
/// Products that leave most of the device idle are cut along K, their sums added by a kernel of
/// their own.
void fp8_linear_gemms(CodesOfX& codes, const TensorView& x,
                      std::span<const LinearWeights* const> weights,
                      std::span<const MutableTensorView> outs, bool accumulate,
                      Workspace& workspace, const Stream& stream);
/// Most that their sums take.
inline constexpr size_t kFp8SumsBytes = size_t{16} << 20;

/// Rows that quantized_rows() takes at a time; more are taken in turns.
inline constexpr int64_t kMaxQuantizedRows = 16;

/// Whether quantized_rows() takes a product: few rows, K in multiples of 16, everything aligned to
/// 16 bytes.
bool takes_quantized_rows(const QuantizedGemm& product);

/// quantized_gemm() of one group without a gate, weights read once for every eight rows.
void quantized_rows(const QuantizedGemm& product, const Stream& stream);

}  // namespace cadre::cuda
