#include "backends/cuda/kernels/hopper_fp8_experts.h"

#include <algorithm>

#include "backends/cuda/kernels/hopper_fp8_rows.h"
#include "backends/cuda/kernels/routing.h"
#include "backends/cuda/kernels/weight_layout.h"

namespace cadre::cuda {
namespace {

constexpr int64_t kMaxChunkBytes = int64_t{4} << 30;  // of the rows between the products
constexpr int64_t kNumCounts = 2;                     // of pieces taken, by gate and up and by down

bool fits(const DeviceMatrices& m, const MatrixLayout& layout) {
  return m.table == nullptr && m.first.col_stride == 1 && fits_tensor_map(layout);
}

CUtensorMap weight_map(const MatrixLayout& layout) {
  return make_tensor_map(layout, kHopperWeightBox, true);
}

// Of the codes and scales of rows.
size_t rows_bytes(int64_t rows, int64_t k) {
  return Workspace::padded(static_cast<size_t>(rows * fp8_row_stride(k))) +
         Workspace::padded(static_cast<size_t>(fp8_groups(k) * fp8_scale_stride(rows)) *
                           sizeof(float));
}

size_t results_bytes(const ExpertsQuery& q, int64_t rows, DType dtype) {
  return Workspace::padded(static_cast<size_t>(rows * q.config.hidden_size) * size_of(dtype));
}

// Results of down keep float32 where the output has it.
DType results_dtype(const ExpertsQuery& q, DType output) {
  return output == DType::kF32 ? DType::kF32 : q.compute_dtype;
}

int64_t chunk_tokens(const ExpertsQuery& q, int64_t num_tokens) {
  const int64_t bytes = 5 * q.config.hidden_size + q.config.intermediate_size;
  return std::min(num_tokens, std::max<int64_t>(1, kMaxChunkBytes / (bytes * q.config.top_k)));
}

Fp8Rows allocate_rows(int64_t rows, int64_t k, Workspace& workspace) {
  Fp8Rows result;
  result.codes = workspace.allocate<uint8_t>(rows * fp8_row_stride(k));
  result.scales = workspace.allocate<float>(fp8_groups(k) * fp8_scale_stride(rows));
  return result;
}

HopperFp8Gemm product(const ExpertsQuery& q, const DeviceWeights& weights) {
  HopperFp8Gemm g;
  g.num_experts = q.config.num_experts;
  g.scale_layout = q.scale_layout;
  g.bias_dtype = weights.bias_dtype;
  return g;
}

void forward_chunk(const ExpertsQuery& q, const DeviceWeights& weights, const HopperFp8Maps& maps,
                   const RoutedTokens& tokens, Workspace& workspace, const Stream& stream) {
  const Workspace::Scope scope(workspace);
  const ExpertsConfig& c = q.config;
  const int64_t rows = tokens.top_k_index.numel();
  const RoutingPlan plan =
      plan_routing(tokens.top_k_index, c.num_experts, workspace, stream, kNumCounts);
  HopperFp8Gemm up = hopper_fp8_up(q, weights, maps);
  up.expert_offsets = plan.expert_offsets;
  up.max_rows = rows;
  up.count = plan.counters;
  up.rows = allocate_rows(rows, c.hidden_size, workspace);
  up.out_rows = allocate_rows(rows, c.intermediate_size, workspace);
  HopperFp8Gemm down = hopper_fp8_down(q, weights, maps);
  down.expert_offsets = plan.expert_offsets;
  down.max_rows = rows;
  down.count = plan.counters + 1;
  down.rows = up.out_rows;
  down.out_dtype = results_dtype(q, tokens.output.dtype());
  down.out = workspace.allocate(results_bytes(q, rows, down.out_dtype));
  quantize_tokens({tokens.hidden_states, plan, c.top_k, up.rows}, stream);
  hopper_fp8_gemm(up, stream);
  hopper_fp8_gemm(down, stream);
  const TensorView y(down.out, down.out_dtype, {rows, c.hidden_size}, stream.device);
  combine(y, plan.row_of_pair, tokens.top_k_weights, tokens.output, stream);
}

}  // namespace

bool fits_hopper_fp8(const ExpertsQuery& query, const DeviceWeights& weights,
                     int compute_capability) {
  const ExpertsConfig& c = query.config;
  const bool is_fp8 =
      query.format == StorageFormat::kFp8Block || query.format == StorageFormat::kFp8Tensor;
  if (compute_capability != 90 || !is_fp8 || c.hidden_size % 8 != 0) return false;
  if (query.activation_scheme != ActivationScheme::kDynamic) return false;
  return fits_hopper_fp8_scales(query.scale_layout) &&
         (!c.has_gate || fits(weights.gate, gate_layout(c, DType::kU8, weights))) &&
         fits(weights.up, up_layout(c, DType::kU8, weights)) &&
         fits(weights.down, down_layout(c, DType::kU8, weights));
}

HopperFp8Maps make_hopper_fp8_maps(const ExpertsQuery& query, const DeviceWeights& weights) {
  const ExpertsConfig& c = query.config;
  HopperFp8Maps maps;
  maps.up = weight_map(up_layout(c, DType::kU8, weights));
  maps.gate = c.has_gate ? weight_map(gate_layout(c, DType::kU8, weights)) : maps.up;
  maps.down = weight_map(down_layout(c, DType::kU8, weights));
  return maps;
}

size_t hopper_fp8_bytes(const ExpertsQuery& query, int64_t max_tokens) {
  const ExpertsConfig& c = query.config;
  const int64_t rows = chunk_tokens(query, max_tokens) * c.top_k;
  return routing_plan_bytes(rows, c.num_experts, kNumCounts) + rows_bytes(rows, c.hidden_size) +
         rows_bytes(rows, c.intermediate_size) + results_bytes(query, rows, DType::kF32);
}

HopperFp8Gemm hopper_fp8_up(const ExpertsQuery& query, const DeviceWeights& weights,
                            const HopperFp8Maps& maps) {
  const ExpertsConfig& c = query.config;
  HopperFp8Gemm up = product(query, weights);
  up.n = c.intermediate_size;
  up.k = c.hidden_size;
  up.gated = c.has_gate;
  up.apply_gate = true;
  up.gate = gate_function(c);
  up.weights = maps.gate;
  up.up_weights = maps.up;
  up.weight_scales = c.has_gate ? weights.gate : weights.up;
  up.up_scales = weights.up;
  up.bias = c.has_gate ? weights.gate_bias : weights.up_bias;
  if (c.has_gate) up.up_bias = weights.up_bias;
  return up;
}

HopperFp8Gemm hopper_fp8_down(const ExpertsQuery& query, const DeviceWeights& weights,
                              const HopperFp8Maps& maps) {
  const ExpertsConfig& c = query.config;
  HopperFp8Gemm down = product(query, weights);
  down.n = down.out_stride = c.hidden_size;
  down.k = c.intermediate_size;
  down.weights = down.up_weights = maps.down;
  down.weight_scales = down.up_scales = weights.down;
  down.bias = weights.down_bias;
  return down;
}

void hopper_fp8_forward(const ExpertsQuery& query, const DeviceWeights& weights,
                        const HopperFp8Maps& maps, const RoutedTokens& tokens, Workspace& workspace,
                        const Stream& stream) {
  const int64_t num_tokens = tokens.hidden_states.dim(0);
  if (num_tokens == 0) return;
  const int64_t step = chunk_tokens(query, num_tokens);
  for (int64_t first = 0; first < num_tokens; first += step) {
    const int64_t last = std::min(first + step, num_tokens);
    const RoutedTokens chunk = {
        tokens.hidden_states.slice(first, last), tokens.top_k_index.slice(first, last),
        tokens.top_k_weights.slice(first, last), tokens.output.slice(first, last)};
    forward_chunk(query, weights, maps, chunk, workspace, stream);
  }
}

}  // namespace cadre::cuda
