// The host side of the kernels for few tokens: memory, parts of long sums.
#include "backends/cuda/kernels/hopper_fp8_few.h"

#include <algorithm>
#include <cmath>

#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/hopper_fp8_few_kernels.h"

namespace cadre::cuda {
namespace {

// Measured: docs/performance_gpu.md.
constexpr int64_t kMostTokens = 64;

constexpr int64_t kMostParts = 4;
constexpr int64_t kPartBlocks = 16;  // at least, of 128 of I: a piece of 256 KB
constexpr double kPieces = 800;      // of down, so that the last ones are a small part of all

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Codes and scales of rows.
size_t codes_bytes(int64_t rows, int64_t k) {
  return Workspace::padded(static_cast<size_t>(rows * fp8_row_stride(k))) +
         Workspace::padded(static_cast<size_t>(rows * fp8_groups(k)) * sizeof(float));
}

ActivationCodes allocate_codes(int64_t rows, int64_t k, Workspace& workspace) {
  auto* codes = workspace.allocate<uint8_t>(rows * fp8_row_stride(k));
  const int64_t groups = fp8_groups(k);
  return {codes, fp8_row_stride(k), workspace.allocate<float>(rows * groups), groups};
}

int64_t most_parts(const ExpertsConfig& c) {
  return std::clamp<int64_t>(fp8_groups(c.intermediate_size) / kPartBlocks, 1, kMostParts);
}

// Long sums of down are cut where there are few of them for the multiprocessors.
void cut_down(const ExpertsConfig& c, int64_t pairs, HopperFp8Few& few) {
  const auto experts = static_cast<double>(c.num_experts);
  const double active = experts * (1 - std::pow(1 - 1 / experts, static_cast<double>(pairs)));
  const double pieces = active * static_cast<double>(divide_up(c.hidden_size, kFp8Group));
  const int64_t blocks = fp8_groups(c.intermediate_size);
  const auto wanted = static_cast<int64_t>(std::min(std::ceil(kPieces / pieces), 1e6));
  const int64_t parts = std::min(wanted, most_parts(c));
  few.down_blocks = static_cast<int32_t>(divide_up(divide_up(blocks, parts), 2) * 2);
  few.parts = static_cast<int32_t>(divide_up(blocks, few.down_blocks));
}

void set_call(const RoutedTokens& tokens, DecodeArgs& a) {
  a.ids = tokens.top_k_index.data();
  a.ids_stride = tokens.top_k_index.stride(0);
  a.ids_are_64 = tokens.top_k_index.dtype() == DType::kI64;
  a.routing_weights = tokens.top_k_weights.data();
  a.routing_weights_stride = tokens.top_k_weights.stride(0);
  a.routing_weights_are_f32 = tokens.top_k_weights.dtype() == DType::kF32;
  a.num_tokens = static_cast<int>(tokens.hidden_states.dim(0));
  a.x = tokens.hidden_states.data();
  a.x_stride = tokens.hidden_states.stride(0);
  a.out = tokens.output.mutable_data();
  a.out_stride = tokens.output.stride(0);
  a.out_is_f32 = tokens.output.dtype() == DType::kF32;
}

void set_layer(const ExpertsQuery& query, const DeviceWeights& w, DecodeArgs& a) {
  const ExpertsConfig& c = query.config;
  a.top_k = static_cast<int>(c.top_k);
  a.num_experts = static_cast<int>(c.num_experts);
  a.hidden = static_cast<int>(c.hidden_size);
  a.intermediate = static_cast<int>(c.intermediate_size);
  a.gate_function = gate_function(c);
  a.gate = w.gate;
  a.up = w.up;
  a.down = w.down;
  a.bias_dtype = w.bias_dtype;
  a.gate_bias = w.gate_bias;
  a.up_bias = w.up_bias;
  a.down_bias = w.down_bias;
  a.compute_dtype = query.compute_dtype;
}

}  // namespace

bool is_hopper_fp8_few(const ExpertsQuery& query, int64_t num_tokens) {
  const ExpertsConfig& c = query.config;
  return num_tokens > 0 && num_tokens <= kMostTokens &&
         hopper_fp8_few_fits(num_tokens * c.top_k, c.num_experts);
}

size_t hopper_fp8_few_bytes(const ExpertsQuery& query, int64_t max_tokens) {
  const ExpertsConfig& c = query.config;
  const int64_t tokens = std::min(max_tokens, std::max<int64_t>(1, kMaxDecodePairs / c.top_k));
  const int64_t pairs = tokens * c.top_k;
  return codes_bytes(tokens, c.hidden_size) + codes_bytes(pairs, c.intermediate_size) +
         Workspace::padded(static_cast<size_t>(pairs * most_parts(c) * c.hidden_size) *
                           sizeof(float)) +
         Workspace::padded(static_cast<size_t>(1 + pairs) * sizeof(uint32_t));
}

void hopper_fp8_few_forward(const ExpertsQuery& query, const DeviceWeights& weights,
                            const HopperFp8Maps& maps, const RoutedTokens& tokens,
                            Workspace& workspace, const Stream& stream) {
  const ExpertsConfig& c = query.config;
  const Workspace::Scope scope(workspace);
  HopperFp8Few few;
  few.gate = maps.gate;
  few.up = maps.up;
  few.down = maps.down;
  few.scale_layout = query.scale_layout;
  set_layer(query, weights, few.args);
  set_call(tokens, few.args);
  const int64_t pairs = tokens.top_k_index.numel();
  cut_down(c, pairs, few);
  few.args.x_codes = allocate_codes(few.args.num_tokens, c.hidden_size, workspace);
  few.args.h_codes = allocate_codes(pairs, c.intermediate_size, workspace);
  few.args.y = workspace.allocate<float>(pairs * few.parts * c.hidden_size);
  few.counters = workspace.allocate<uint32_t>(1 + pairs);
  hopper_fp8_few_quantize(few, stream);
  hopper_fp8_few_products(few, stream);
  hopper_fp8_few_combine(few, stream);
}

}  // namespace cadre::cuda
