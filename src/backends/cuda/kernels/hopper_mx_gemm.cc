#include "backends/cuda/kernels/hopper_mx_gemm.h"

#include "backends/cuda/kernels/tensor_map.h"

namespace cadre::cuda {
namespace mx {

void run_fp4(const HopperMxGemm& args, const Stream& stream);
void run_mxfp8(const HopperMxGemm& args, const Stream& stream);
void run_fp8(const HopperMxGemm& args, const Stream& stream);

}  // namespace mx

namespace {

constexpr int kBoxRows = 128;

bool is_fp4(StorageFormat format) { return format == StorageFormat::kFp4; }

MatrixLayout layout_of(StorageFormat format, const DeviceMatrices& m, int64_t num_experts,
                       int64_t n, int64_t k) {
  return {DType::kU8,  m.first.data,       row_bytes(format, k), n,
          num_experts, m.first.row_stride, m.expert_stride};
}

bool is_fp8(StorageFormat format) {
  return format == StorageFormat::kFp8Block || format == StorageFormat::kFp8Tensor;
}

bool fits(const ExpertsQuery& query, const DeviceMatrices& m, int64_t n, int64_t k) {
  if (m.table != nullptr || m.first.col_stride != 1 ||
      !fits_tensor_map(layout_of(query.format, m, query.config.num_experts, n, k))) {
    return false;
  }
  const auto is_even = [](auto value) { return value % 2 == 0; };
  return is_fp8(query.format) ||
         (m.first.scale_col_stride == 1 && is_even(reinterpret_cast<intptr_t>(m.first.scales)) &&
          is_even(m.first.scale_row_stride) && is_even(m.scale_expert_bytes));
}

// Whether format, blocks and activations are ones that the kernels take.
bool fits_arithmetic(const ExpertsQuery& query) {
  if (is_fp8(query.format)) {
    const int64_t columns = query.scale_layout.block_cols;
    return query.activation_scheme == ActivationScheme::kDynamic &&
           (columns == 128 || columns == 0);
  }
  const bool is_mx = is_fp4(query.format) || query.format == StorageFormat::kMxFp8;
  return is_mx && query.compute_dtype == DType::kBF16 &&
         query.activation_scheme == ActivationScheme::kNone;
}

}  // namespace

bool fits_hopper_mx(const ExpertsQuery& query, const DeviceWeights& weights,
                    int compute_capability) {
  const ExpertsConfig& c = query.config;
  if (compute_capability != 90 || !fits_arithmetic(query)) return false;
  if (c.hidden_size % 64 != 0 || c.intermediate_size % 64 != 0) return false;
  return (!c.has_gate || fits(query, weights.gate, c.intermediate_size, c.hidden_size)) &&
         fits(query, weights.up, c.intermediate_size, c.hidden_size) &&
         fits(query, weights.down, c.hidden_size, c.intermediate_size);
}

CUtensorMap make_mx_map(StorageFormat format, const DeviceMatrices& weights, int64_t num_experts,
                        int64_t n, int64_t k) {
  // 64 of K.
  return make_tensor_map(layout_of(format, weights, num_experts, n, k), kBoxRows, true,
                         is_fp4(format) ? 32 : 64);
}

void hopper_mx_gemm(const HopperMxGemm& args, const Stream& stream) {
  if (args.max_rows == 0) return;
  if (is_fp8(args.format)) return mx::run_fp8(args, stream);
  is_fp4(args.format) ? mx::run_fp4(args, stream) : mx::run_mxfp8(args, stream);
}

}  // namespace cadre::cuda
